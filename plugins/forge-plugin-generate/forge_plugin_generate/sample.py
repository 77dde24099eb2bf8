"""Samples with the log-probabilities of their tokens, the same under every layout: for reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from forge_core.contracts.data import Batch
from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import Model
from forge_kit.nn.generation import Generates, JointGeneration, WholeModel, joint_generation
from forge_kit.nn.routes import RouteRecord, recorded_routes
from forge_plugin_generate.generate import Sampling, check_cache
from forge_plugin_generate.running_rows import RowEnd, RunningRows


@frozen
class Sampled:
    """What was drawn after a prompt."""

    ids: list[int] = field(factory=list)
    """With the id that ended it, if one did."""
    log_p: list[float] = field(factory=list)
    """Log-probability of each id by the model itself, at temperature 1 and among all tokens."""
    log_q: list[float] = field(factory=list)
    """Log-probability of each id in the distribution that it was drawn from, after temperature, top-k and top-p."""
    routes: Mapping[str, Tensor] | None = None
    """By the name of the batch entry of `forge_kit.nn.routes`, (n, K) int16: the experts of the n tokens that the model
    has read, which are all of prompt and ids but the last one. Each rank of a pipeline has the routes of its layers.
    None unless `sample` was told to record them."""

    def ended(self, stops: Sequence[int]) -> bool:
        """Whether one of `stops` ended it, and not the greatest length."""
        return bool(self.ids) and self.ids[-1] in stops


@torch.no_grad()
def sample(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stops: Sequence[int],
    sampling: Sampling,
    seeds: Sequence[int],
    routes: bool = False,
) -> list[Sampled]:
    """Continue each prompt by up to `max_tokens` tokens, drawn with a seed for each.

    What a row draws depends on its seed and logits alone, and so on neither the other rows nor the layout. Ranks call
    this as they call `forge_plugin_generate.generate.generate`.

    Args:
        model: a model with a cache, in evaluation mode.
        prompts: token ids, none empty.
        max_tokens: upper bound of the tokens for each prompt, the one that ends it included.
        stops: ids that end a row.
        sampling: settings of the draws.
        seeds: one for each prompt, of up to 63 bits.
        routes: record the experts that routers choose for each token; compiled layers then run as plain Python.

    Raises:
        ForgeError: there is no prompt, one is empty, or the model has no cache, or one that forgets what a layer needs.
    """
    if not prompts or not all(prompts):
        raise ForgeError("there is no prompt, or an empty one; pass at least one token on every rank")
    if not isinstance(model, Generates):
        raise ForgeError(f"{type(model).__name__} cannot generate: it has no new_cache and decode")
    joint = joint_generation(model)
    if isinstance(joint, WholeModel):
        check_cache(model)
    drawn = SeededDraws(sampling, seeds, stops)
    end = RowEnd(list(stops), max_tokens)
    # Rows that have ended stay in the batch until all have, and may read as many tokens
    record = RouteRecord(len(prompts), max(map(len, prompts)) + max_tokens) if routes else None
    draw: Callable[[Tensor, Sequence[int]], Tensor] = drawn
    if record is not None:
        joint, draw = RecordingGeneration(model, record), _then(record, drawn)
    with nullcontext() if record is None else recorded_routes(model, record):
        RunningRows(joint, prompts, end, draw, batch_size=len(prompts), use_cache=True, entries={}).run()
    if record is None:
        return drawn.rows
    tables = record.tables()
    return [
        evolve(
            row,
            routes={entry: table[number, : len(prompts[number]) + len(row.ids) - 1] for entry, table in tables.items()},
        )
        for number, row in enumerate(drawn.rows)
    ]


class RecordingGeneration(JointGeneration):
    """Notes the positions of each call of the model, whose routers add to a record."""

    def __init__(self, model: Model, record: RouteRecord) -> None:
        super().__init__(model)
        self._record = record

    def next_logits(self, batch: Batch, cache: Any) -> Tensor:
        """See `JointGeneration.next_logits`."""
        self._record.positions.append(batch["positions"])
        return super().next_logits(batch, cache)


def _then(record: RouteRecord, drawn: SeededDraws) -> Callable[[Tensor, Sequence[int]], Tensor]:
    """Draws, and notes the rows of the calls that the logits are from."""

    def draw(logits: Tensor, rows: Sequence[int]) -> Tensor:
        record.assign(rows)
        return drawn(logits, rows)

    return draw


class SeededDraws:
    """Draws the next token of each row by a generator of that row, and records it with its log-probabilities."""

    def __init__(self, sampling: Sampling, seeds: Sequence[int], stops: Sequence[int]) -> None:
        self._sampling, self._stops = sampling, stops
        # On the host, whatever the device of the model: the same numbers everywhere
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.rows = [Sampled() for _ in seeds]

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """(B, V) logits of the rows of these numbers -> (B,) tokens."""
        # As wide as in training, with whose log-probabilities these are compared
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p = logits.log_softmax(-1)
        if self._sampling.temperature == 0:
            tokens, log_q = logits.argmax(-1), None
        else:
            log_q = self._sampling.truncated(logits).log_softmax(-1)
            tokens = _at_quantiles(log_q.exp(), self._uniform(rows, log_q))
        of_p, of_q = (_chosen(log, tokens) for log in (log_p, log_q))
        for number, id_, value_p, value_q in zip(rows, tokens.tolist(), of_p, of_q, strict=True):
            row = self.rows[number]
            # Rows that have ended may stay in the batch for some steps
            if not row.ended(self._stops):
                row.ids.append(id_)
                row.log_p.append(value_p)
                row.log_q.append(value_q)
        return tokens

    def _uniform(self, rows: Sequence[int], like: Tensor) -> Tensor:
        """(B,) numbers in [0, 1), by each row's generator."""
        # On the host in float64, so that devices and dtypes draw the same numbers
        numbers = [torch.rand((), generator=self._generators[number], dtype=torch.float64) for number in rows]
        return torch.stack(numbers).to(like.device, like.dtype)


def _at_quantiles(p: Tensor, u: Tensor) -> Tensor:
    """(B, V) probabilities, (B,) numbers in [0, 1) -> (B,): the first token whose cumulative sum exceeds the number."""
    sums = p.cumsum(-1)
    # Times the total, which rounding keeps from being 1; and below the last token that has a probability
    token = torch.searchsorted(sums, (u * sums[:, -1])[:, None], right=True)[:, 0]
    last = p.shape[-1] - 1 - (p > 0).flip(-1).int().argmax(-1)
    return torch.minimum(token, last)


def _chosen(log: Tensor | None, tokens: Tensor) -> list[float]:
    """The entries of the drawn tokens; 0 without draws, as the most likely token is then certain."""
    if log is None:
        return [0.0] * len(tokens)
    values: list[float] = log.gather(-1, tokens[:, None])[:, 0].tolist()
    return values
