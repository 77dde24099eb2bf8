"""Rewards that need no model."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core import Problem
from forge_plugin_grpo.kinds import Completion, RewardComponent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class Answer(RewardComponent):
    """1 if a completion has ended and its answer is that of the line, else 0.

    Numbers are compared by value (`7` and `7.0` are equal), all else as text without the white space around it.
    """

    key: str = "answer"
    """Key of a line that has the answer."""
    pattern: str = ""
    """Regular expression whose first group, in its last match, is the answer of a completion (`#### *(.+)`); empty: all
    of the text. A completion without a match scores 0."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the expression."""
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            yield Problem("pattern", f"{self.pattern!r} is no regular expression: {error}")
            return
        if self.pattern and not groups:
            yield Problem("pattern", f"{self.pattern!r} has no group (…) that would be the answer")

    def row_fault(self, row: Mapping[str, Any]) -> str:
        """See `RewardComponent.row_fault`."""
        if self.key in row:
            return ""
        return f"there is no key {self.key!r} with the answer, only {', '.join(map(repr, row))}; set `key` to another"

    def score(self, completion: Completion) -> float:
        """See `RewardComponent.score`."""
        text = completion.text
        if self.pattern:
            matches = list(re.finditer(self.pattern, text))
            if not matches:
                return 0.0
            # A group that took no part in the match is None
            text = matches[-1][1] or ""
        # A completion that was cut may have a part of its answer: `12` of `120`
        return float(completion.ended and _same(text, str(completion.row[self.key])))


def _same(one: str, other: str) -> bool:
    one, other = one.strip(), other.strip()
    try:
        # Commas separate thousands, as in the answers of GSM8K
        numbers = [float(text.replace(",", "")) for text in (one, other)]
    except ValueError:
        return one == other
    # Python reads words such as `nan` and `infinity` as numbers, too
    return numbers[0] == numbers[1] if all(map(math.isfinite, numbers)) else one == other
