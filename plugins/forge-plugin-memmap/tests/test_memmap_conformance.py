"""`memmap` keeps the contracts of its kind."""

from __future__ import annotations

import numpy as np

from forge_plugin_memmap import Memmap
from forge_testing.suites import DatasetSuite


class TestMemmap(DatasetSuite):
    def make(self, folder):
        tokens = np.random.default_rng(0).integers(1, 32, 900)
        tokens[29::30] = 0
        for number, part in enumerate(np.split(tokens, [330, 600])):
            np.save(folder / f"{number}.npy", part.astype(np.uint16))
        return Memmap(path=f"{folder}/*.npy", end_of_text=0, held_out_every=4)
