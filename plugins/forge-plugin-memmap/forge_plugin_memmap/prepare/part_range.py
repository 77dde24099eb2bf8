"""Which part of the inputs a command does, where `--part K/N` divides the work."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from attrs import frozen

from forge_plugin_memmap.prepare.inputs import Input, InputPosition, end_of, position_of


@frozen
class Part:
    """Part `number` of `count`, counted from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Type of the option `--part`; the inverse of `str`."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise argparse.ArgumentTypeError(f"{text!r} is no part; write 1/8 to 8/8")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def of_folder(cls, name: str) -> Part | None:
        """The inverse of `folder`; None for a folder that is no part's."""
        match = re.fullmatch(r"(\d+)-of-(\d+)", name)
        return match and cls(int(match[1]), int(match[2]))

    @property
    def folder(self) -> str:
        """Name of its folder among the parts."""
        return f"{self.number}-of-{self.count}"

    def bounds(self, inputs: Sequence[Input]) -> tuple[InputPosition, InputPosition]:
        """Returns where this part begins and ends.

        The bytes of all inputs are divided evenly, and a document belongs to the part in which it begins. Each part
        finds its bounds without reading what lies before them, and begins where the part before it ends.
        """
        return self._bound(inputs, self.number - 1), self._bound(inputs, self.number)

    def _bound(self, inputs: Sequence[Input], number: int) -> InputPosition:
        # Not by its byte, at which empty files may lie that belong to the last part
        if number == self.count:
            return end_of(inputs)
        return position_of(inputs, end_of(inputs).passed * number // self.count)
