"""The distribution and its dataset keep the contracts of plugins."""

from __future__ import annotations

import numpy as np
from video_rows import MODEL

from forge_plugin_images.video import Frames, PyAV, Uniform, VideoText
from forge_plugin_text import Bytes
from forge_testing.clips import bar_code, write_clip
from forge_testing.suites import DatasetSuite


class TestVideoText(DatasetSuite):
    has_images = True
    job = {"model": MODEL, "seq_len": 64, "global_batch_size": 2, "data": {"tokenizer": Bytes()}}

    def make(self, folder):
        folder.mkdir(exist_ok=True)
        for number in range(8):
            write_clip(folder / f"{number}.mp4", [bar_code(number, 16, 48)] * 3, np.arange(3) / 4)
            (folder / f"{number}.txt").write_text(f"clip {number}")
        sampling = Uniform(fps=8, min_frames=1, max_frames=2, jitter=True)
        return VideoText(path=str(folder), held_out_every=4, video=Frames(sampling=sampling, reader=PyAV()))
