"""The verdict of a replay on a step: data, weights or hardware."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

BEFORE = 20
"""Steps before the replayed one whose losses serve as the usual values."""
ROUNDING = 1e-4
"""Relative difference of losses and norms on another number of ranks, or another kind of processor."""
CAUSES = ("HARDWARE", "DATA", "WEIGHTS")
"""Words with which a line of the verdict begins that names a cause."""
Pair = tuple[float, float]
"""Loss and gradient norm of a step."""


@frozen(kw_only=True)
class Replay:
    """A step that was computed again."""

    step: int
    recorded: Mapping[int, Pair]
    """Figures of the run's steps up to this one."""
    again: Mapping[int, Pair]
    """Figures of the steps from a checkpoint up to this one."""
    recorded_gradients: Sequence[str]
    """Digest of each rank's gradients; empty where the step was not checked."""
    gradients: Sequence[str]
    losses: Sequence[float]
    """Loss of every sequence of the step, in nats a token."""
    worst: Sequence[Mapping[str, Any]]
    """`loss`, `source` and `text` of the worst sequences."""

    def report(self, with_digest: bool = False) -> str:
        """Returns the whole report."""
        pairs = {"recorded": self.recorded[self.step], "again": self.again[self.step]}
        lines = [f"step {self.step}", *(f"  {name:<9} loss {a!r}, grad norm {b!r}" for name, (a, b) in pairs.items())]
        if with_digest:
            lines += ["digests of the gradients, by rank", f"  recorded  {_listed(self.recorded_gradients)}"]
            lines += [f"  again     {_listed(self.gradients)}"]
        lines += ["", *self.verdict(), "", f"worst {len(self.worst)} of {len(self.losses)} sequences, in nats a token"]
        shown = (f"{each['source']}  {json.dumps(each['text'], ensure_ascii=False)}" for each in self.worst)
        lines += [f"  {each['loss']:.4f}  {text}" for each, text in zip(self.worst, shown, strict=True)]
        return "\n".join(lines)

    def facts(self) -> dict[str, Any]:
        """Returns the whole report as plain types; the digests are empty where none were computed."""
        lines = self.verdict()
        causes = [line.partition(":")[0].lower() for line in lines if line.startswith(tuple(f"{c}:" for c in CAUSES))]
        return {
            "step": self.step,
            "recorded": _facts(self.recorded[self.step], self.recorded_gradients),
            "again": _facts(self.again[self.step], self.gradients),
            "cause": causes[0] if causes else None,
            "verdict": " ".join(lines),
            "sequences": len(self.losses),
            "worst": self.worst,
        }

    def verdict(self) -> list[str]:
        """Returns what made the step, in words."""
        away = {step: distance(self.recorded[step], pair) for step, pair in self.again.items() if step in self.recorded}
        differing = [step for step, value in sorted(away.items()) if value]
        # Where steps before agree to the bit, this is the same arithmetic, and nothing later can be rounding.
        if differing and (differing[0] > min(away) or max(away.values()) > ROUNDING):
            return self._hardware(differing[0], differing[0] > min(away))
        if not differing and (ranks := self._ranks_with_other_gradients()):
            return [
                f"HARDWARE: loss and norm come out again to the bit, but not the gradients of rank {', '.join(ranks)}.",
                "What was recorded there is not what the step computes.",
            ]
        if differing:
            first = [
                f"The record is met within {max(away.values()):.1g}: rounding, if the run had another number of ranks,",
                "or processors of another kind; if it had the same, they or this machine have erred.",
            ]
        else:
            gradients = ", and the digests of the gradients," if self._same_gradients else ""
            first = [f"Loss and norm{gradients} come out again to the bit: the hardware computed this step right."]
        return [*first, *self._data_or_weights()]

    @property
    def _same_gradients(self) -> bool:
        return any(self.gradients) and list(self.gradients) == list(self.recorded_gradients)

    def _ranks_with_other_gradients(self) -> list[str]:
        if len(self.gradients) != len(self.recorded_gradients) or not any(self.recorded_gradients):
            return []
        pairs = enumerate(zip(self.recorded_gradients, self.gradients, strict=True))
        return [str(rank) for rank, (one, other) in pairs if one != other]

    def _hardware(self, first: int, agreed_before: bool) -> list[str]:
        before = "; the steps before it come out again to the bit" if agreed_before else ""
        return [
            f"HARDWARE: from step {first} on, the run recorded other numbers than come out here{before}.",
            f"A processor, memory or link of the run erred in step {first}, or in the update before it; or this",
            "machine errs now. A replay on a third machine decides which.",
        ]

    def _data_or_weights(self) -> list[str]:
        middle = statistics.median(self.losses)
        near = (loss for step, (loss, _) in self.recorded.items() if self.step - BEFORE <= step < self.step)
        usual = [loss for loss in near if math.isfinite(loss)]
        before = f"the {len(usual)} steps before had {statistics.fmean(usual):.4f}" if usual else "it is the first step"
        if outliers := self._outliers(middle) or self._excess(usual):
            count = f"{len(outliers)} of {len(self.losses)} sequences stand{'s' if len(outliers) == 1 else ''} out"
            return [f"DATA: {count}, from {min(outliers):.4f} on; the median is {middle:.4f}; {before}."]
        if usual and not middle <= _highest_usual(usual):
            return [
                f"WEIGHTS: no sequence stands out, all are worse than usual: the median is {middle:.4f}; {before}.",
                "Look at the updates before it: learning rate, clipping, gradient norms.",
            ]
        return [f"Neither a sequence nor the step stands out: the median is {middle:.4f}; {before}."]

    def _outliers(self, middle: float) -> list[float]:
        """Losses far from all others; none if the median is one of them."""
        # The median deviation of a normal distribution times 1.4826 is its standard deviation.
        spread = 1.4826 * statistics.median(abs(loss - middle) for loss in self.losses)
        # `not <=`, so that NaN stands out. Losses that are nearly equal have hardly any spread: hence the second bound
        outliers = [loss for loss in self.losses if not loss <= middle + max(6 * spread, 0.25 * middle)]
        return outliers if 2 * len(outliers) < len(self.losses) else []

    def _excess(self, usual: Sequence[float]) -> list[float]:
        """The worst losses, if the step is worse than usual and without them it is not; none if they are half of it.

        Of a few sequences, or of sources with unlike losses, the spread is so wide that nothing is far from all others.
        """
        best_first = sorted(self.losses)
        for count in range((len(best_first) + 1) // 2) if usual else ():
            rest = best_first[: len(best_first) - count]
            if statistics.fmean(rest) <= _highest_usual(usual):
                return best_first[len(rest) :]
        return []


def _highest_usual(losses: Sequence[float]) -> float:
    """The loss up to which a step is like those before it."""
    return statistics.fmean(losses) + max(4 * statistics.pstdev(losses), 0.1 * losses[-1])


def distance(one: Pair, other: Pair) -> float:
    """The largest relative difference; infinite where only one of two is finite."""
    return max(_relative(a, b) for a, b in zip(one, other, strict=True))


def _relative(a: float, b: float) -> float:
    # Two NaN are the same outcome, though not equal
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a) and math.isfinite(b) else math.inf


def _facts(pair: Pair, digests: Sequence[str]) -> dict[str, Any]:
    return {"loss": pair[0], "grad_norm": pair[1], "gradients": list(digests) if any(digests) else []}


def _listed(digests: Sequence[str]) -> str:
    return " ".join(digests) if any(digests) else "none"
