"""Clips of shapes in motion as mp4 files in the cache."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, field, frozen

from forge_core import report_progress
from forge_kit.data.cache import cached_folder, digest_of
from forge_plugin_images.source import Split
from forge_plugin_images.video.motion_images import draw_motion
from forge_plugin_images.video.motions import Motion, split_motions
from forge_plugin_images.video.video_text import VideoText

if TYPE_CHECKING:
    from forge_plugin_images.video.moving_shapes import MovingShapes

FORMAT = 1
"""Part of the key: increase it when the same settings make other clips."""
TRAINING, HELD_OUT = "training.tar", "held-out.tar"
LOSSLESS = {"qp": "0", "preset": "ultrafast", "bf": "2"}
"""Options of x264. With losses a frame could have traces of those before it, which tell where a shape came from."""


@frozen(kw_only=True)
class StoredClips(VideoText):
    """Clips and captions in tar files, of which those in one are held out."""

    held_out_file: str = field(default="")
    """Empty: none are."""

    def split_of_documents(self) -> Split:
        """Returns a split by file: every clip of the second tar file is held out."""
        return Split(0, frozenset({self.held_out_file} - {""}))


def stored_clips(keys: MovingShapes) -> StoredClips:
    """Returns the source of the clips, which are encoded unless they are in the cache."""
    folder = cached_folder("moving-shapes", digest_of(FORMAT, _drawn(keys)), lambda folder: _encode(keys, folder)).path
    held_out = str(folder / HELD_OUT) if keys.held_out else ""
    paths = [str(folder / TRAINING), *([held_out] if held_out else [])]
    return StoredClips(path=tuple(paths), video=keys.video, held_out_file=held_out)


def _drawn(keys: MovingShapes) -> dict[str, Any]:
    """Returns all that clips depend on: the keys, except how they are read."""
    return asdict(keys, recurse=False, filter=lambda attribute, _: attribute.name != "video")


def _encode(keys: MovingShapes, folder: Path) -> Mapping[str, Any]:
    split = split_motions(keys)
    # Held-out clips have drawings with other numbers: their backgrounds are new to the model, too.
    drawings = range(keys.drawings + keys.held_out_drawings)
    _write(keys, split.training, drawings[: keys.drawings], folder / TRAINING)
    if split.held_out:
        _write(keys, split.held_out, drawings[keys.drawings :], folder / HELD_OUT)
    return {"combinations": len(split.training), "held_out": len(split.held_out)}


def _write(keys: MovingShapes, motions: Sequence[Motion], drawings: Sequence[int], path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number, (motion, drawing) in enumerate(product(motions, drawings)):
            _add(archive, f"{number:06}.mp4", encoded(keys, motion, drawing))
            _add(archive, f"{number:06}.txt", motion.caption.encode())
            if number % 100 == 0:
                report_progress(f"{number:,} clips encoded")  # other ranks wait for this one


def encoded(keys: MovingShapes, motion: Motion, drawing: int) -> bytes:
    """Returns an mp4 file (H.264), whose decoded frames depend each on the drawn one alone."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        rate = Fraction(keys.fps).limit_denominator(1000)
        stream: Any = output.add_stream("libx264", rate=rate, options=LOSSLESS)
        stream.height, stream.width = keys.size
        # One thread: the output of x264 depends on their number
        stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", 1
        for frame in draw_motion(keys, motion, drawing):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        output.mux(stream.encode(None))
    return file.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    # The time of a new `TarInfo` is 0, so that the same keys write the same bytes
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))
