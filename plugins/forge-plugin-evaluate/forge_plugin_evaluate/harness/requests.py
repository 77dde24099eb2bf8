"""Requests of the harness as rows of tokens, and its settings of generation. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from forge_core.contracts.errors import JobError

MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names under which tasks give the most tokens to generate; the first one counts, as in the harness."""
SETTINGS = {*MOST_TOKENS, "until", "do_sample", "temperature", "top_k", "top_p"}


@frozen
class Scored:
    """Tokens of which a request wants the log-probability."""

    request: int
    tokens: tuple[int, ...]
    """At the end of the row, the last one after it."""


@frozen
class Row:
    """One row that the model is fed, for all requests that need it."""

    inputs: tuple[int, ...]
    scored: list[Scored] = field(factory=list)


def rows_of(requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], max_length: int) -> list[Row]:
    """The rows of requests, the longest first.

    Requests that differ in their last token alone, as answers of one letter do, share a row.

    Args:
        requests: (anything, tokens of the context, tokens of the continuation).
        max_length: positions of a row; longer ones lose tokens on the left.

    Raises:
        JobError: a continuation is empty, or does not fit.
    """
    rows: dict[tuple[int, ...], Row] = {}
    for number, (_, context, continuation) in enumerate(requests):
        if not 0 < len(continuation) <= max_length:
            message = f"a continuation has {len(continuation)} tokens, and rows have 1 to {max_length}"
            raise JobError(f"{message}; choose another --max-length, or leave its task out")
        # One more than the row has positions, since the last token is only a label
        tokens = (*context, *continuation)[-(max_length + 1) :]
        inputs = tuple(tokens[:-1])
        rows.setdefault(inputs, Row(inputs)).scored.append(Scored(number, tuple(continuation)))
    # Memory that does not suffice shows in the first batch then
    return sorted(rows.values(), key=lambda row: -len(row.inputs))


@frozen(kw_only=True)
class GenerationSettings:
    """How a request wants its text to be generated."""

    max_tokens: int
    until: tuple[str, ...] = ()
    """Texts at which an answer ends."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, given: Mapping[str, Any], max_tokens: int) -> GenerationSettings:
        """Read the harness' settings.

        Args:
            given: the `generation_kwargs` of a task.
            max_tokens: tokens to generate at most, where it does not say.

        Raises:
            JobError: there are settings that Forge does not have.
        """
        if unknown := sorted(set(given) - SETTINGS):
            message = f"generation_kwargs has {', '.join(unknown)}, and Forge has {', '.join(sorted(SETTINGS))}"
            raise JobError(f"{message}; set others by --gen-kwargs, or leave the task out")
        until = given.get("until") or ()
        temperature = float(given.get("temperature") or 0.0)
        sampled = given.get("do_sample")
        # A temperature alone means sampling
        if sampled is None:
            sampled = temperature > 0
        return cls(
            max_tokens=int(next((given[name] for name in MOST_TOKENS if given.get(name) is not None), max_tokens)),
            # An empty text is part of any answer, and would end it at once
            until=(until,) if isinstance(until, str) else tuple(text for text in until if text),
            # Sampling without a temperature is sampling from the model's own distribution.
            temperature=(temperature or float("temperature" not in given)) if sampled else 0.0,
            top_k=int(given.get("top_k") or 0) if sampled else 0,
            top_p=float(given.get("top_p") or 1.0) if sampled else 1.0,
        )


def batches(rows: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yields up to `size` rows at a time."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def before_any(text: str, ends: Sequence[str]) -> str:
    """Returns the text up to the first of several others that it contains."""
    for end in ends:
        text = text.partition(end)[0]
    return text
