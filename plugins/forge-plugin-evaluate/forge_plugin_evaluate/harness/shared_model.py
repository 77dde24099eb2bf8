"""`SharedLM`: a trained model that several ranks share, as lm-evaluation-harness calls it.

Shapes: B rows, S positions, D model width, V vocabulary of this rank, N scored tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.contracts.runtime import LossOutput
from forge_core.parallel.mesh import all_reduce_tokens, gather_objects, sample_rank
from forge_core.vocab_parallel import (
    accumulation_dtype,
    combine_gathered,
    combine_logsumexp,
    local_labels,
)
from forge_kit.nn.batches import length_multiple
from forge_kit.nn.products import size_multiple
from forge_kit.tools.ranks import executor_of
from forge_plugin_evaluate.harness.model import ForgeLM, Prompts, first_of_largest
from forge_plugin_evaluate.harness.requests import Row, batches, rows_of

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch, Tokenizer
    from forge_core.contracts.model import Head, VocabShard
    from forge_kit.tools.trained_model import TrainedModel

IN_TURN = 2
"""Micro-batches for each rank of a pipeline that are run at a time: of one alone, all ranks but one would wait."""
STEP = 8
"""Lengths of rows are multiples of it: for each new length, a pipeline has to determine the shapes that it sends."""


class SharedLM(ForgeLM):
    """A `ForgeLM` of several ranks, each of which makes every call, with the same requests, and has all results.

    Ranks with different sequences (`fsdp`, copies) divide the requests; ranks of `tp`, `pp`, `cp` and `ep` compute
    together. Results are the same as in one process, up to the rounding of logits.
    """

    def __init__(self, trained: TrainedModel, tokenizer: Tokenizer, **settings: Any) -> None:
        """Wrap a model that was loaded on every rank.

        Args:
            trained: of `forge_core.load_model` with `parallel`.
            tokenizer: its tokenizer.
            settings: as for `ForgeLM`.

        Raises:
            JobError: as `ForgeLM`; or the layout cannot divide `max_length`.
        """
        super().__init__(trained.model, tokenizer, **settings)
        self._trained, layout = trained, trained.context.layout
        self._divides, self._group = length_multiple(layout), layout.data_parallel
        layers = math.prod(size for dimension, size in layout.sizes if dimension.layers)
        self._at_once = IN_TURN * layers if layers > 1 else 1
        if self._length % self._divides and self._length != trained.job.train.seq_len:
            message = f"--max-length {self._length} is not divisible by {self._divides}, and {layout} divides sequences"
            raise JobError(f"{message}; take {self._length // self._divides * self._divides or self._divides}")
        self._executor = executor_of(trained)
        self._generated: set[int] = set()
        """Requests of `generate_until` whose texts this rank has generated."""

    def get_model_info(self) -> dict[str, Any]:
        """Counts the parameters of the whole model, of which this rank has a part."""
        return {**super().get_model_info(), "model_num_parameters": sum(self._trained.built.outline.sizes.values())}

    # --- log-probabilities -----------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        _check_same([(context, continuation) for _, context, continuation in requests])
        # One request a row, as executors return two numbers for each: of several that share one, each has its own.
        rows = [Row(row.inputs, [scored]) for row in rows_of(requests, self._length) for scored in row.scored]
        # Zero where this rank computes nothing, so that the sum over ranks has every result
        table = torch.zeros(2, len(requests), dtype=torch.float64, device=self._device)
        with tqdm(total=len(rows), disable=disable_tqdm, desc="log-probabilities") as bar:
            for step in batches(rows, self._rows * self._group * self._at_once):
                micro_batches, numbers = self._micro_batches(step)
                outputs = self._executor.evaluate(micro_batches, self._measure).per_sequence
                table.index_add_(1, numbers, torch.stack([output.double() for output in outputs]))
                bar.update(len(step))
        sums, hits = all_reduce_tokens(table, self._trained.context.mesh).tolist()
        lengths = [len(continuation) for _, _, continuation in requests]
        results = [(total, hit == length) for total, hit, length in zip(sums, hits, lengths, strict=True)]
        for (key, *_), result in zip(requests, results, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def _micro_batches(self, step: Sequence[Row]) -> tuple[list[Batch], Tensor]:
        """Returns this rank's micro-batches, of equal shape and number on all ranks, and the request of each row."""
        share = -(-len(step) // self._group)
        size = min(self._rows, share)
        own = list(step[self._sample_rank() :: self._group])
        # Rows without a label fill the remaining places, and add nothing to request 0.
        own += [Row((self.eot_token_id,))] * (-(-share // size) * size - len(own))
        # By the longest row of all ranks, the first as they are sorted: all ranks need equal shapes
        length = self._row_length(len(step[0].inputs), size)
        ids, labels = (torch.full((len(own), length), fill) for fill in (self.eot_token_id, IGNORED_LABEL))
        for number, row in enumerate(own):
            ids[number, : len(row.inputs)] = torch.tensor(row.inputs)
            for scored in row.scored:
                labels[number, len(row.inputs) - len(scored.tokens) : len(row.inputs)] = torch.tensor(scored.tokens)
        numbers = torch.tensor([row.scored[0].request if row.scored else 0 for row in own], device=self._device)
        pairs = zip(ids.to(self._device).split(size), labels.to(self._device).split(size), strict=True)
        return [{"input_ids": own_ids, "labels": own_labels} for own_ids, own_labels in pairs], numbers

    def _row_length(self, longest: int, rows: int) -> int:
        """Returns a length that the layout can divide, and whose products are fast; see `ForgeLM._padded`."""
        multiple = size_multiple(torch.float32) if self._device.type == "cpu" else 1
        multiple = math.lcm(STEP, self._divides, multiple // math.gcd(multiple, rows))
        return min(-(-longest // multiple) * multiple, max(self._length, longest))

    def _measure(self, head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        """Returns for each row the log-probability of its labels, and how many of them are the likeliest tokens."""
        labels = batch["labels"]
        values, hits = torch.zeros(2, *labels.shape, dtype=torch.float64, device=hidden.device)
        # Ranks that share the head have the same labels, and so as many parts.
        places = (labels != IGNORED_LABEL).nonzero()
        with head.whole(hidden.dtype):
            for part in places.split(self._at_a_time()) if len(places) else ():
                where = part.unbind(1)
                values[where], hits[where] = scored(head.logits(hidden[where]), labels[where], head.vocab_shard)
        sums, counts = values.sum(-1), hits.sum(-1)
        return LossOutput(sums.sum(), counts.sum(), (sums, counts))

    # --- generation ------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate this rank's share, and return the texts of all ranks. Collective."""
        _check_same([request.args for request in requests])
        own = super().generate_until(requests, disable_tqdm)
        texts = gather_objects({number: text for number, text in enumerate(own) if number in self._generated})
        self._generated = set()
        return [next(part[number] for part in texts if number in part) for number in range(len(requests))]

    def _own(self, together: Sequence[Prompts], drawn: bool) -> Iterator[Prompts]:
        # Greedy prompts are divided; of batches that are drawn, each stays as it is in one process. All ranks generate
        # equally often, and at least one prompt: ranks of `fsdp` gather weights for each other.
        rank = self._sample_rank()
        if drawn:
            own = [together[min(first + rank, len(together) - 1)] for first in range(0, len(together), self._group)]
        else:
            own = [group[rank :: self._group] or group[:1] for group in together]
        for prompts in own:
            self._generated.update(number for _, number in prompts)
            yield prompts

    def _sample_rank(self) -> int:
        return sample_rank(self._trained.context.mesh, self._trained.context.layout)


def scored(logits: Tensor, labels: Tensor, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Returns the labels' log-probabilities (N,), float64, and whether each is the likeliest token (N,). Collective.

    Args:
        logits: (N, V), this rank's slice of the vocabulary.
        labels: (N,), in the whole vocabulary.
        shard: which slice that is; None: all of it.
    """
    logits = logits.to(accumulation_dtype(logits.dtype))
    index, inside = local_labels(labels, shard)
    right = combine_gathered(logits.gather(-1, index[:, None])[:, 0], inside, shard)
    normaliser = combine_logsumexp(logits.logsumexp(-1), shard)
    own_top = logits.amax(-1)
    # Reduced in place, and this rank's part is compared with it below
    top = own_top.clone()
    if shard is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=shard.group)
    if shard is None:
        return (right - normaliser).double(), first_of_largest(logits, labels, right == top).double()
    # The first one of the largest logits, as `argmax` of the whole has it: asked where the label's is as large as any.
    likeliest = right == top
    rows = likeliest.nonzero()[:, 0]
    first = logits[rows].argmax(-1) + shard.offset
    # A rank without the largest logit must not win the minimum below
    first = first.where(own_top[rows] == top[rows], torch.iinfo(first.dtype).max)
    dist.all_reduce(first, dist.ReduceOp.MIN, group=shard.group)
    return (right - normaliser).double(), likeliest.index_put((rows,), first == labels[rows]).double()


def _check_same(requests: Any) -> None:
    """Check that all ranks have the same requests: they add up their partial results for each request."""
    digest = hashlib.sha256(repr(requests).encode()).hexdigest()
    if len(set(gather_objects(digest))) > 1:  # on all ranks alike, so that none waits for another
        raise ForgeError("ranks have different requests; give all of them the same tasks, data and versions of Python")
