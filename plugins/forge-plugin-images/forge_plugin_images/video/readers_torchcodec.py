"""Reads clips with torchcodec."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

import numpy as np
from attrs import define

from forge_plugin_images.decoding import FileImage
from forge_plugin_images.image_file import ImageFile
from forge_plugin_images.video.kinds import TOLERANCE, BrokenVideo, Clip, Unreadable
from forge_plugin_images.video.readers_pyav import PyAVReader, opened


@define
class TorchCodecReader:
    """A `VideoReader` that decodes with torchcodec, in one thread; the container is read by PyAV."""

    max_duration: float

    def probe(self, file: ImageFile) -> Clip:
        """See `VideoReader`."""
        return PyAVReader(max_duration=self.max_duration).probe(file)

    def frames(self, file: ImageFile, clip: Clip, numbers: Sequence[int]) -> list[np.ndarray]:
        """See `VideoReader`. Frames that are damaged and yet come out of the decoder are not noticed."""
        VideoDecoder = import_module("torchcodec.decoders").VideoDecoder
        with opened(file) as (container, stream, _):
            if container.format.name == "mpegts":
                raise Unreadable("torchcodec misses the key frames of MPEG transport streams; take the reader pyav")
            assert stream.time_base is not None
            rate = stream.time_base.denominator / stream.time_base.numerator
            index = stream.index
        source = nullcontext(file.name) if isinstance(file, FileImage) else file.open()
        try:
            with source as data:
                decoder = VideoDecoder(
                    data,
                    stream_index=index,
                    dimension_order="NHWC",
                    num_ffmpeg_threads=1,
                    device="cpu",
                    custom_frame_mappings=_mappings(clip, rate),  # else it reads the whole clip for its times
                )
                batch = decoder.get_frames_at(list(numbers))
        except Exception as error:  # RuntimeError for all of FFmpeg's, ValueError and TypeError for its own
            raise BrokenVideo(file.name, f"torchcodec: {error}") from error
        # It returns a neighbour for a frame that is missing, without an error.
        self._check(file, clip, numbers, batch.pts_seconds.numpy(), tuple(batch.data.shape[1:3]))
        return list(batch.data.numpy())

    def _check(
        self, file: ImageFile, clip: Clip, numbers: Sequence[int], times: np.ndarray, size: tuple[int, ...]
    ) -> None:
        if size != clip[:2]:
            here, there = (f"{width} x {height}" for height, width in (clip[:2], size))
            raise BrokenVideo(file.name, f"its frames have {there} pixels and not {here}")
        for number, time in zip(numbers, times, strict=True):
            if abs(time - clip.times[number]) > TOLERANCE:
                message = f"frame {number} at {clip.times[number]:.3f} s is missing: torchcodec has one at {time:.3f} s"
                raise BrokenVideo(file.name, message)


def _mappings(clip: Clip, rate: float) -> str:
    """Returns the clip's frames in the form that torchcodec takes; `rate` is ticks a second."""
    stamps = np.rint(clip.times * rate).astype(np.int64)
    ends = np.append(stamps[1:], round((clip.times[0] + clip.duration) * rate))
    columns = zip(stamps.tolist(), (ends - stamps).tolist(), clip.keys.astype(int).tolist(), strict=True)
    return json.dumps({"frames": [{"pts": a, "duration": b, "key_frame": c} for a, b, c in columns]})
