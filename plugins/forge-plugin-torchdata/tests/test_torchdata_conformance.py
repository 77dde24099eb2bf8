"""The distribution is as a plugin's must be, and `pipeline` keeps the contract of datasets."""

from __future__ import annotations

from forge_plugin_torchdata import Pipeline
from forge_testing.suites import DatasetSuite

COUNTING = """
import numpy as np
from torch.utils.data import RandomSampler
from torchdata.nodes import MapStyleWrapper

class Sequences:
    def __init__(self, lane):
        self.lane = lane
    def __len__(self):
        return 10
    def __getitem__(self, index):
        tokens = (self.lane.number + self.lane.count * index + np.arange(self.lane.seq_len + 1)) % 32
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

def make(lane):
    return MapStyleWrapper(Sequences(lane), range(10))

def held_out(lane):
    tokens = (3 * np.arange(lane.seq_len + 1)) % 32
    return [{"input_ids": tokens[:-1], "labels": tokens[1:]}] * 3
"""


class TestPipeline(DatasetSuite):
    def make(self, folder):
        (folder / "counting.py").write_text(COUNTING)
        factory = f"{folder}/counting.py"
        return Pipeline(factory=f"{factory}:make", held_out=f"{factory}:held_out", lanes=2)
