"""Training sequences that take their time, so that a kill finds the run training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import DatasetComponent
from forge_testing import Numbers

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Dataset


@frozen(kw_only=True)
class SlowNumbers(DatasetComponent):
    """The numbers of `forge_testing`, with a pause before each training sequence."""

    sequences: int = 64
    start: int = 0
    pause_s: float = field(default=0.002, validator=ge(0))

    def build(self, context: BuildContext) -> Dataset:
        numbers = Numbers(sequences=self.sequences, start=self.start).build(context)
        return SlowSequences(numbers, self.pause_s)


@frozen
class SlowSequences:
    """See `forge_core.contracts.data.Dataset`."""

    numbers: Any
    pause_s: float

    @property
    def held_out(self) -> Dataset | None:
        return self.numbers.held_out

    @property
    def bytes_per_token(self) -> float | None:
        return self.numbers.bytes_per_token

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        time.sleep(self.pause_s)
        return self.numbers[index]
