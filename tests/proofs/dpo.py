"""Direct preference optimisation (Rafailov et al. 2023): learns which of two answers is preferred, from pairs of them.

    [loss]
    type = "./dpo.py:DPO"
    reference = "runs/base/checkpoints/step-1000"

    [checkpoint.load]
    path = "runs/base/checkpoints/step-1000"

    [[data.sources]]
    type = "./dpo.py:Pairs"
    path = "pairs.jsonl"        # a line: {"prompt": …, "chosen": …, "rejected": …}

The engine draws sequences one by one, in an order of its own. So a pair is one sequence: the chosen answer in its first
half and the rejected one in the second, two documents that do not see each other. B pairs, S positions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from attrs.validators import ge, gt
from torch.nn.functional import logsigmoid

from forge_core import DatasetComponent, JobError, LossComponent, Problem
from forge_core.cross_entropy import loss_output
from forge_core.engine.trained import load_trained
from forge_core.protocols import IGNORED_LABEL
from forge_core.vocab_parallel import vocab_cross_entropy


@frozen(kw_only=True)
class DPO(LossComponent):
    """-log sigmoid(beta (r(chosen) - r(rejected))) of each pair, r = log p(answer) - log p_reference(answer).

    The mean over pairs is logged as `loss/dpo`, with the share of pairs in the right order and their mean margin. The
    loss that is reported is the cross-entropy of the chosen answers.
    """

    reference: str
    """What the frozen reference is taken from: a checkpoint, or a run folder or job file with one."""
    beta: float = field(default=0.1, validator=gt(0))
    """How dear it is to leave the reference."""

    def problems(self, job, layout):
        if not Path(self.reference).exists():
            fix = "give a checkpoint, a run folder or a job file"
            yield Problem("reference", f"{self.reference} does not exist; {fix}")
        if layout.cp > 1:
            yield Problem("", "compares whole answers, which parallel.cp splits; leave it out")

    def build(self, context):
        reference = load_trained(Path(self.reference), context).model

        def loss(head, hidden, batch):
            valid = batch["labels"] != IGNORED_LABEL
            chosen = batch["document_ids"] == 0
            log_p = log_probabilities(head, hidden, batch)
            anchor = log_p.sum() * 0
            if torch.is_grad_enabled():
                with torch.no_grad():
                    reference_log_p = log_probabilities(reference.head, reference(dict(batch)), batch)
                margins = self.beta * ((log_p - reference_log_p) * torch.where(chosen, 1, -1)).sum(-1)
                # Attached, as the mean is over the pairs of the global batch, and the sum that a loss returns is
                # divided by its tokens.
                anchor = context.auxiliary.attach(anchor, -logsigmoid(margins).sum(), unit="sequence", name="loss/dpo")
                context.auxiliary.metric("dpo/accuracy", (margins > 0).sum(), unit="sequence")
                context.auxiliary.metric("dpo/margin", margins.sum(), unit="sequence")
            return loss_output(anchor, -log_p.where(chosen, 0), valid & chosen)

        return loss


def log_probabilities(head, hidden, batch) -> torch.Tensor:
    """(B, S): log p of each label, 0 where it is ignored."""
    labels = batch["labels"]
    with head.whole(hidden.dtype):
        logits = head.logits(hidden)
    losses, _ = vocab_cross_entropy(logits, labels.clamp(min=0), head.vocab_shard)
    return -losses.where(labels != IGNORED_LABEL, 0)


@frozen(kw_only=True)
class Pairs(DatasetComponent):
    """Pairs of answers to a prompt, from a JSONL file. Each gets half of `train.seq_len`; the prompt is not learned."""

    path: str
    """File with a line `{"prompt": …, "chosen": …, "rejected": …}` for each pair."""
    keep_out: int = field(default=0, validator=ge(0))
    """How many of the last pairs are for evaluation only."""

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
        cut = len(rows) - self.keep_out
        return Rows(rows[:cut], Rows(rows[cut:]) if self.keep_out else None)


def encode(tokenizer, prompt: str, answer: str, length: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(length,) each: ids, and labels of the answer and its end; None if it is longer than that."""
    before = tokenizer.encode(prompt)
    ids = [*before, *tokenizer.encode(answer), tokenizer.end_of_text]
    missing = length + 1 - len(ids)
    if missing < 0:
        return None
    labels = [IGNORED_LABEL] * (len(before) - 1) + ids[len(before) :] + [IGNORED_LABEL] * missing
    return np.array(ids + [tokenizer.end_of_text] * missing)[:-1], np.array(labels)


@frozen
class Rows:
    """See `forge_core.protocols.Dataset`."""

    rows: list[dict[str, np.ndarray]]
    held_out: Any = None
    bytes_per_token = None

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]
