"""Pairs of answers to a prompt, of which one is preferred: what `dpo.py` learns from.

    [[data.sources]]
    type = "./pairs.py:Pairs"
    path = "pairs.jsonl"

The engine draws sequences one by one, in an order of its own. So a pair is one sequence: the chosen answer in its first
half and the rejected one in the second, two documents that do not see each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen
from attrs.validators import ge

from forge_core import DatasetComponent, JobError, Problem
from forge_core.contracts.data import IGNORED_LABEL


@frozen(kw_only=True)
class Pairs(DatasetComponent):
    """Pairs of answers to a prompt, from a JSONL file. Each gets half of `train.seq_len`; the prompt is not learned."""

    path: str
    """File with a line `{"prompt": …, "chosen": …, "rejected": …}` for each pair."""
    keep_out: int = field(default=0, validator=ge(0))
    """How many of the last pairs are for evaluation only."""

    def problems(self, job, layout):
        if not Path(self.path).is_file():
            yield Problem("path", f"there is no file {self.path!r}")
        if job.data.tokenizer is None:
            yield Problem("", "answers are text; add [data.tokenizer]")
        if job.train.seq_len % 2:
            yield Problem("", f"a pair has two equal halves; make train.seq_len = {job.train.seq_len} even")

    def documents(self):
        for line in Path(self.path).read_text().splitlines():
            yield from json.loads(line).values()

    def build(self, context):
        pairs = [json.loads(line) for line in Path(self.path).read_text().splitlines()]
        half = context.job.train.seq_len // 2
        rows = []
        for number, pair in enumerate(pairs, 1):
            answers = [encode(context.tokenizer, pair["prompt"], pair[kind], half) for kind in ("chosen", "rejected")]
            if None in answers:
                seen = f"{self.path}, line {number}, does not fit: a prompt with an answer has {half} tokens"
                raise JobError([Problem("path", f"{seen}; raise train.seq_len, which is twice that")])
            (chosen, chosen_labels), (rejected, rejected_labels) = answers
            ids, labels = np.concatenate([chosen, rejected]), np.concatenate([chosen_labels, rejected_labels])
            apart = {"document_ids": np.repeat([0, 1], half), "positions": np.tile(np.arange(half), 2)}
            rows.append({"input_ids": ids, "labels": labels, **apart})
        cut = max(0, len(rows) - self.keep_out)
        return Rows(rows[:cut], Rows(rows[cut:]) if self.keep_out else None)


def encode(tokenizer, prompt: str, answer: str, length: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(length,) each: ids, and labels of the answer and its end; None if it is longer than that."""
    before = tokenizer.encode(prompt)
    ids = [*before, *tokenizer.encode(answer), tokenizer.end_of_text]
    missing = length + 1 - len(ids)
    if missing < 0:
        return None
    targets = [IGNORED_LABEL] * len(before) + ids[len(before) :] + [IGNORED_LABEL] * missing
    return np.array(ids + [tokenizer.end_of_text] * missing)[:-1], np.array(targets[1:])


@frozen
class Rows:
    """See `forge_core.contracts.data.Dataset`."""

    rows: list[dict[str, np.ndarray]]
    held_out: Any = None
    bytes_per_token = None

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]
