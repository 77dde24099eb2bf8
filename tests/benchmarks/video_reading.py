"""Frames of clips in CPU time: the readers of forge-plugin-images beside PyAV and torchcodec used plainly.

    OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python tests/benchmarks/video_reading.py

Each side opens the clip, finds out its length and returns the same frames as RGB, in one thread. All take turns; ratios
are medians over the turns. Plain ways:

- `av, all`: PyAV decodes from the first frame to the last wanted one, as most data sets do;
- `av, seek`: PyAV seeks to the key frame before each wanted frame and decodes on from there;
- `torchcodec`: `VideoDecoder(path).get_frames_at(numbers)`, exact and approximate.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import av
import numpy as np

from forge_plugin_images.decoding import FileImage
from forge_plugin_images.video import PyAV, TorchCodec
from forge_plugin_images.video.readers import torchcodec_problem
from forge_testing.clips import bar_code, read_bar_code, write_clip

RATE, BAND = 25, 32
ENCODERS = {
    "h264": ("libx264", {"preset": "veryfast"}),
    "h264, key frame each s": ("libx264", {"preset": "veryfast", "g": "25"}),
    "hevc": ("libx265", {"preset": "ultrafast", "x265-params": "log-level=none:bframes=3"}),
    "vp9": ("libvpx-vp9", {"deadline": "realtime", "cpu-used": "8", "g": "128"}),
    "av1": ("libsvtav1", {"preset": "13", "g": "128"}),
    "mpeg4": ("mpeg4", {"g": "12", "bf": "2"}),
}
Way = Callable[[Path, Sequence[int]], Sequence[np.ndarray]]


def pictures(frames: int, height: int, width: int) -> list[np.ndarray]:
    """A texture that moves, below a bar code."""
    coarse = np.random.default_rng(0).integers(30, 225, (height // 4, width // 4, 3)).astype(np.float32)
    texture = np.kron(coarse, np.ones((8, 8, 1), np.float32))
    for axis in (0, 1):  # soft edges
        texture = sum(np.roll(texture, shift, axis) for shift in range(-3, 4)) / 7
    found = []
    for number in range(frames):
        down, right = number * 2 % 300, number * 3 % 600
        picture = texture[down : down + height, right : right + width].astype(np.uint8)
        picture[:BAND, :96] = bar_code(number, BAND)
        found.append(picture)
    return found


def av_all(path: Path, numbers: Sequence[int]) -> list[np.ndarray]:
    wanted, found = set(numbers), []
    with av.open(str(path)) as container:
        container.streams.video[0].thread_count = 1
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                found.append(frame.to_ndarray(format="rgb24"))
            if number == numbers[-1]:
                break
    return found


def av_seek(path: Path, numbers: Sequence[int]) -> list[np.ndarray]:
    found = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_count = 1
        for number in numbers:
            stamp = round(number / RATE / stream.time_base)
            container.seek(stamp, stream=stream)
            for frame in container.decode(stream):
                if frame.pts >= stamp:
                    found.append(frame.to_ndarray(format="rgb24"))
                    break
    return found


def torchcodec_way(mode: str) -> Way:
    from torchcodec.decoders import VideoDecoder

    def frames(path: Path, numbers: Sequence[int]) -> Sequence[np.ndarray]:
        decoder = VideoDecoder(str(path), dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode=mode)
        return decoder.get_frames_at(list(numbers)).data.numpy()

    return frames


def forge_way(component: PyAV | TorchCodec) -> Way:
    def frames(path: Path, numbers: Sequence[int]) -> Sequence[np.ndarray]:
        reader = component.build()
        clip = reader.probe(file := FileImage(str(path)))
        return reader.frames(file, clip, numbers)

    return frames


def ways() -> dict[str, Way]:
    """All ways, plain ones first."""
    found: dict[str, Way] = {"av, all": av_all, "av, seek": av_seek}
    reason = torchcodec_problem()
    if reason:
        print(f"torchcodec does not load: {reason}")
        return {**found, "forge pyav": forge_way(PyAV())}
    import torch

    torch.set_num_threads(1)
    codec = {f"torchcodec, {mode}": torchcodec_way(mode) for mode in ("exact", "approximate")}
    return {**found, **codec, "forge pyav": forge_way(PyAV()), "forge torchcodec": forge_way(TorchCodec())}


def measure(path: Path, numbers: Sequence[int], rounds: int) -> None:
    """Prints milliseconds of each way, and those of the plain way with the least beside those of Forge."""
    spent: dict[str, list[float]] = {name: [] for name in ways()}
    wrong: set[str] = set()
    for turn in range(rounds + 1):
        for name, way in ways().items():
            begin = time.process_time()
            frames = way(path, numbers)
            if turn:  # the first one warms up
                spent[name].append(1000 * (time.process_time() - begin))
            elif [read_bar_code(frame[:BAND, :96]) for frame in frames] != list(numbers):
                wrong.add(name)
    plain = [name for name in spent if not name.startswith("forge") and name not in wrong]
    for name, times in spent.items():
        note = " (other frames)" if name in wrong else ""
        print(f"  {name:24} {median(times):8.1f} ms {len(numbers) / median(times) * 1000:7.0f} frames/s{note}")
    best = min(plain, key=lambda name: median(spent[name]))
    for name in (name for name in spent if name.startswith("forge")):
        ratio = median(theirs / ours for theirs, ours in zip(spent[best], spent[name], strict=True))
        print(f"  {name}: {ratio:.2f} times the frames a second of {best}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=24, help="length of the clips")
    parser.add_argument("--frames", type=int, nargs="+", default=[8, 32], help="frames wanted of a clip")
    parser.add_argument("--height", type=int, default=360, help="pixels of a frame; 16 / 9 times as wide")
    parser.add_argument("--rounds", type=int, default=9, help="turns that count")
    parser.add_argument("--codecs", nargs="+", default=list(ENCODERS), choices=list(ENCODERS))
    options = parser.parse_args()
    height, width = options.height, options.height * 16 // 9
    images = pictures(options.seconds * RATE, height, width)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.codecs:
            encoder, settings = ENCODERS[name]
            write_clip(path := Path(folder, "clip.mp4"), images, codec=encoder, options=settings)
            for count in options.frames:
                numbers = np.linspace(0, len(images) - 1, count).round().astype(int).tolist()
                print(f"{name}, {width} x {height}, {count} of {len(images)} frames", flush=True)
                measure(path, numbers, options.rounds)


if __name__ == "__main__":
    main()
