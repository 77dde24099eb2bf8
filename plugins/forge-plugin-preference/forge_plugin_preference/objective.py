"""The loss function of a preference loss: from hidden states to sums over answers, and to the means that are logged.

Shapes: B rows, S positions of this rank, E ids of documents, N = B x places for examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import ForgeError
from forge_core.contracts.phase import Phase
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.losses import loss_output
from forge_core.parallel import mesh as mesh_of_run
from forge_kit.torch_internals import detect_fake_mode
from forge_plugin_losses.adapters_off import without_adapters
from forge_plugin_losses.apart import check_apart
from forge_plugin_losses.log_probabilities import log_probabilities
from forge_plugin_losses.reference import Reference, load_reference
from forge_plugin_losses.reference_path import ADAPTERS_OFF, starts_as_reference
from forge_plugin_losses.shared_rows import shared_groups
from forge_plugin_losses.workspace import Workspace
from forge_plugin_preference.answers import (
    ABSENT,
    BASELINE,
    CHOSEN,
    KINDS,
    LOSSES,
    MISMATCHED,
    REFERENCE,
    Answers,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core.auxiliary import Auxiliary
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Head, Model
    from forge_core.contracts.runtime import Executor, LossFunction, LossOutput
    from forge_plugin_preference.base import AnswerLoss, PairLoss, PreferenceLoss
    from forge_plugin_preference.kto import KTO

TOKEN_ENTRIES = ("input_ids", "labels", "document_ids", "positions")
PLANNED_PLACES = 65
"""Ids of documents in a row of a planned step: those of `pairs` by default."""
FILLER = -1.0
"""log p of an answer that is not there: finite, and so are its gradients, which a mask then makes 0."""


def preference_loss(loss: PreferenceLoss, context: BuildContext) -> LossFunction:
    """Build the loss function of a preference loss. Collective if it loads a reference."""
    objective = Objective.of(loss, context)
    register(objective)
    return objective.training


@frozen(eq=False)
class Objective:
    """A preference loss with what it has built for a run."""

    loss: AnswerLoss
    auxiliary: Auxiliary
    reference: Reference | None
    groups: Sequence[dist.ProcessGroup]
    """Of ranks that hold different positions of the same rows."""
    workspace: Workspace
    starts_as_reference: bool
    """Whether the first loss is known, and to be checked."""
    chunk_tokens: int = 0
    """As `PreferenceLoss.chunk_tokens`."""

    @classmethod
    def of(cls, loss: PreferenceLoss, context: BuildContext) -> Objective:
        """Load the reference, if the loss names one. Collective."""
        check_apart(context)
        path = getattr(loss, "reference", "")
        own = path in ("", ADAPTERS_OFF)
        reference = None if own else load_reference(Path(path), context, loss.chunk_tokens)
        checked = path and getattr(loss, "check_first_loss", False) and detect_fake_mode() is None
        # Found out here, where every rank is: of a hook or a summary, some ranks alone might ask
        starts = bool(checked) and starts_as_reference(path, context)
        groups = shared_groups(context)
        # One memory for logits: those of the reference are gone before the model's are computed
        workspace = Workspace() if reference is None else reference.workspace
        return cls(loss, context.auxiliary, reference, groups, workspace, starts, loss.chunk_tokens)

    @property
    def adapters_off(self) -> bool:
        """Whether the reference is the model in training with its adapters off."""
        return getattr(self.loss, "reference", "") == ADAPTERS_OFF

    @property
    def known_start(self) -> str:
        """Why the first loss is known, for the error about another one."""
        loaded = "[checkpoint.load] loads the weights of loss.reference"
        return "adapters begin at zero" if self.adapters_off else loaded

    @property
    def ranks(self) -> int:
        """Number of ranks that share a row."""
        return math.prod(dist.get_world_size(group) for group in self.groups)

    def training(self, head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        """A `LossFunction`. Without gradients, as in evaluations, the cross-entropy of the chosen answers alone."""
        rows, log_p = Rows.of(batch, self.loss), self.log_p(head, hidden, batch)
        # The objective is attached: a loss returns sums over tokens, and this one is a mean over examples
        anchor = log_p.sum() * 0
        if torch.is_grad_enabled():
            anchor = self._attach(anchor, self._terms(rows, log_p, batch))
        return loss_output(anchor, -log_p.where(rows.is_chosen, 0), rows.is_chosen)

    def sums(self, head: Head, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Returns (2,) by the name of each metric: sum and count of this rank's part of the rows, for evaluations."""
        terms = self.terms(head, hidden, batch)
        values = {name: values for name, (_, values) in terms.objective.items()} | dict(terms.logged)
        masked = {name: (each, terms.mask) for name, each in values.items()} | dict(terms.by_kind)
        return {name: _sum_and_count(each, mask) / self.ranks for name, (each, mask) in masked.items()}

    def terms(self, head: Head, hidden: Tensor, batch: Batch) -> Terms:
        """Returns what the loss makes of the examples of a micro-batch. Collective."""
        return self._terms(Rows.of(batch, self.loss), self.log_p(head, hidden, batch), batch)

    def baseline(self, executor: Executor, model: Model, batches: Sequence[Batch], mesh: DeviceMesh | None) -> Tensor:
        """Returns (): the reference point of KTO on these batches, from their rows of mismatched answers. Collective.

        Raises:
            ForgeError: they have no such rows.
        """
        rows = [mismatched(batch) for batch in batches]
        reference: Callable[[Batch], Tensor]
        if self.adapters_off:
            # Executors take micro-batches in order, which each rank's values are in as well
            values = iter(without_adapters(executor, model, rows, self.log_p))
            reference = lambda batch: next(values)  # noqa: E731
        else:
            assert self.reference is not None, "KTO.problems refuses data with the reference's log-probabilities"
            reference = self.reference.log_probabilities

        def ratios(head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
            ratio = self.log_p(head, hidden, batch) - reference(batch)
            return loss_output(ratio.sum(), ratio, batch["labels"] != IGNORED_LABEL)

        output = executor.evaluate(rows, ratios)
        return mean_ratio(output.loss_sum, batches, mesh).clamp(min=0)

    def add_reference(self, executor: Executor, model: Model, batches: Sequence[Batch]) -> None:
        """Add to each micro-batch the log-probabilities of its answers under the model with adapters off. Collective.

        They take the place of log-probabilities in the data, in the entry `REFERENCE`.
        """
        every = without_adapters(executor, model, batches, self._answer_sums)
        # Of a pipeline, the last rank alone computes losses: the others have no sums, and need none
        for batch, sums in zip(batches, every, strict=False):
            batch[REFERENCE] = sums[:, None]  # type: ignore[index]

    def _answer_sums(self, head: Head, hidden: Tensor, batch: Batch) -> Tensor:
        """Returns (B, E): log p of each document, summed over all ranks that share a row. Collective."""
        answers, _ = Rows.of(batch, self.loss).answers(self.log_p(head, hidden, batch), None, self.groups)
        return answers.log_p

    def log_p(self, head: Head, hidden: Tensor, batch: Batch) -> Tensor:
        """Returns (B, S): log p of each label, 0 where there is none."""
        return log_probabilities(
            head, hidden, batch["labels"], chunk_tokens=self.chunk_tokens, workspace=self.workspace
        )

    def _terms(self, rows: Rows, log_p: Tensor, batch: Batch) -> Terms:
        reference = None
        if self.loss.uses_reference:
            reference = rows.stored if self.reference is None else self.reference.log_probabilities(batch)
            if reference is None:
                message = f"batches have no {REFERENCE}, which a hook adds before each step"
                raise ForgeError(f"loss: {message} for loss.reference = {ADAPTERS_OFF!r}")
        answers, there = rows.answers(log_p, reference, self.groups)
        if self.loss.paired:
            return pair_terms(self.loss, answers, there)  # type: ignore[arg-type]
        return single_terms(self.loss, answers, there, rows)  # type: ignore[arg-type]

    def _attach(self, x: Tensor, terms: Terms) -> Tensor:
        """Returns `x` with the objective attached, and logs the metrics of a training step."""
        # Ranks that share rows all compute the same values, and what they attach is summed
        for name, (weight, values) in terms.objective.items():
            total = values.where(terms.mask, 0).sum() / self.ranks
            if weight:
                x = self.auxiliary.attach(x, total, unit="example", name=name, weight=weight)
            else:
                self.auxiliary.metric(name, total, unit="example")
        for name, values in terms.logged.items():
            total = values.detach().where(terms.mask, 0).sum() / self.ranks
            self.auxiliary.metric(name, total, unit="example")
        if terms.by_kind:
            counts = [_sum_and_count(values, mask) / self.ranks for values, mask in terms.by_kind.values()]
            self.auxiliary.count("rewards", 0, torch.cat(counts))
            self.auxiliary.summarise("rewards", partial(_means_by_kind, list(terms.by_kind)))
        return x


_OBJECTIVES: WeakKeyDictionary[Auxiliary, Objective] = WeakKeyDictionary()
"""By the auxiliary values of a run: for hooks and evaluations, which have no other access to what its loss built."""


def register(objective: Objective) -> None:
    """Let hooks and evaluations of its run find an objective."""
    _OBJECTIVES[objective.auxiliary] = objective


def objective_of(auxiliary: Auxiliary) -> Objective:
    """Returns the objective of the run with these auxiliary values.

    Raises:
        ForgeError: its loss is no preference loss.
    """
    if auxiliary not in _OBJECTIVES:
        raise ForgeError(f"the loss of this run compares no answers; take type = {LOSSES}")
    return _OBJECTIVES[auxiliary]


def _sum_and_count(values: Tensor, mask: Tensor) -> Tensor:
    """(2,) float64."""
    return torch.stack([values.detach().where(mask, 0).sum().double(), mask.sum().double()])


def _means_by_kind(names: Sequence[str], counts: Mapping[int, Tensor]) -> Mapping[str, Tensor]:
    pairs = counts[0].view(-1, 2)
    means = dict(zip(names, pairs[:, 0] / pairs[:, 1].clamp(min=1), strict=True))
    return means | {"rewards/margin": means["rewards/chosen"] - means["rewards/rejected"]}


# --- answers ---------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Rows:
    """The answers in the rows of a micro-batch."""

    documents: Tensor
    """(B, S): id of each position's document."""
    kinds: Tensor
    """(B, E): what each document is."""
    valid: Tensor
    """(B, S): whether a position has a label."""
    stored: Tensor | None
    """(B, E): log-probabilities under the reference that the data have."""
    z: Tensor | None
    """(B,): the reference point of KTO."""

    @classmethod
    def of(cls, batch: Batch, loss: AnswerLoss) -> Rows:
        """Read a batch.

        Raises:
            ForgeError: it lacks an entry that this loss needs.
        """
        needed = ["document_ids", KINDS, "examples", *(["positions"] if loss.scores_answers else [])]
        needed += [REFERENCE] if loss.uses_reference and not getattr(loss, "reference", "") else []
        missing = [name for name in needed if name not in batch]
        if missing and detect_fake_mode() is not None:
            return cls._planned(batch)
        if missing:
            message = f"batches have no {', '.join(missing)}, by which {type(loss).__name__} finds the answers in a row"
            raise ForgeError(f'loss: {message}; take a source of type "pairs", or give these entries')
        kinds = batch[KINDS][:, 0]
        stored, z = batch[REFERENCE][:, 0] if REFERENCE in batch else None, batch.get(BASELINE)
        if ProgressBeacon.phase == Phase.DRY_RUN:
            # Hooks add these before each step, and have not run yet; the shapes of a step do not depend on values
            zeros = torch.zeros_like(kinds, dtype=torch.float64)
            stored, z = zeros if stored is None else stored, zeros[:, 0]
        return cls(batch["document_ids"], kinds, batch["labels"] != IGNORED_LABEL, stored, z)

    @classmethod
    def _planned(cls, batch: Batch) -> Rows:
        """Rows without values, for a planned step, whose batches have tokens alone."""
        labels = batch["labels"]
        kinds = labels.new_zeros(len(labels), PLANNED_PLACES)
        stored = torch.zeros_like(kinds, dtype=torch.float64)
        return cls(torch.zeros_like(labels), kinds, labels != IGNORED_LABEL, stored, stored[:, 0])

    @property
    def is_chosen(self) -> Tensor:
        """(B, S): whether a position has a label that belongs to a chosen, or desirable, answer."""
        return self.valid & (self.kinds.gather(1, self.documents) == CHOSEN)

    def answers(
        self, log_p: Tensor, reference: Tensor | None, groups: Sequence[dist.ProcessGroup]
    ) -> tuple[Answers, Tensor]:
        """All documents as answers: sums over the positions of all ranks that share a row. Collective.

        Args:
            log_p: (B, S) of the policy.
            reference: (B, S) of the reference model, or `stored`; None: not used.
            groups: of `shared_groups`.

        Returns:
            Answers whose tensors are (B, E), and (B, E) bool: which of them are there.
        """
        parts = [self._sum(log_p), self.count_labels(log_p.dtype)]
        if reference is not None and reference is not self.stored:
            parts.append(self._sum(reference))
        # Stacked, so that ranks which share rows reduce once
        stacked = torch.stack(parts)
        sums, tokens, *rest = sum_over_ranks(stacked, groups) if groups else stacked
        # Values from the data are of whole answers: a sum over ranks would count them several times
        if reference is not None and reference is self.stored:
            rest = [reference.to(sums.dtype)]
        # An evaluation fills its last batch with rows whose labels are all ignored
        there = (self.kinds != ABSENT) & (tokens > 0)
        filled = [values.where(there, FILLER) for values in (sums, *rest)]
        return Answers(filled[0], tokens.clamp(min=1), *filled[1:]), there

    def count_labels(self, dtype: torch.dtype) -> Tensor:
        """Returns (B, E): the labels of each document that are on this rank."""
        return self._sum(self.valid.to(dtype))

    def _sum(self, values: Tensor) -> Tensor:
        """(B, S) -> (B, E): sums over the positions of each document."""
        # Not by `scatter_add`, whose order is random on a GPU
        ids = torch.arange(self.kinds.shape[1], device=values.device)
        inside = self.documents[:, None, :] == ids[:, None]
        return values[:, None, :].where(inside, 0).sum(-1)


def sum_over_ranks(values: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Returns the sum of `values` over all ranks of some groups, of which each computes the same. Collective."""
    total: Tensor = _SumOverRanks.apply(values, groups)
    return total


class _SumOverRanks(torch.autograd.Function):
    """Sums over groups; backward too, as each rank's part of the objective depends on the parts of all."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
        ctx.groups = groups
        return _summed(values, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.groups), None


def _summed(values: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    # Reduced in place, and neither autograd's input nor its gradient may change
    values = values.clone(memory_format=torch.contiguous_format)
    for group in groups:
        dist.all_reduce(values, group=group)
    return values


# --- terms -----------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Terms:
    """What a loss makes of N places for examples; all values are (N,)."""

    mask: Tensor
    """Bool: which of them are there."""
    objective: Mapping[str, tuple[float, Tensor]]
    """By the name of the metric: weight in the objective, and values."""
    logged: Mapping[str, Tensor]
    """Further metrics, means over examples."""
    by_kind: Mapping[str, tuple[Tensor, Tensor]]
    """Values and a mask by the name of a metric, the mean over the examples of that mask."""


def pair_terms(loss: PairLoss, answers: Answers, there: Tensor) -> Terms:
    """The terms of a loss over pairs, of answers (B, E).

    Raises:
        ForgeError: ids of documents are no pairs, or `losses` returned another shape.
    """
    chosen, rejected = (_every_second(answers, first) for first in (0, 1))
    mask = there[:, :-1].reshape(-1, 2).all(-1)
    values = loss.losses(chosen, rejected)
    if values.shape != mask.shape:
        message = f"returned the shape {tuple(values.shape)} for {len(mask)} pairs"
        raise ForgeError(f"loss: {type(loss).__name__}.losses {message}; it returns one number for each pair")
    logged = reward_metrics(loss.rewards(chosen), loss.rewards(rejected))
    logged |= {"logps/chosen": chosen.log_p, "logps/rejected": rejected.log_p}
    return Terms(mask, {loss.metric: (1.0, values), **loss.further(chosen, rejected)}, logged, {})


def _every_second(answers: Answers, first: int) -> Answers:
    """The chosen (0) or rejected (1) answers of (B, E) documents, the last of which is padding: (N,)."""
    reference = None if answers.reference is None else pairs_of(answers.reference)[first]
    return Answers(pairs_of(answers.log_p)[first], pairs_of(answers.tokens)[first], reference)


def pairs_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the values of the chosen and of the rejected answers, (N,) each, from the ones of documents (B, E).

    Raises:
        ForgeError: ids of documents are no pairs.
    """
    if not values.shape[1] % 2:
        message = f"rows have {values.shape[1]} ids of documents, and pairs with one for the padding have an odd number"
        raise ForgeError(f"loss: {message}")
    return values[:, 0:-1:2].reshape(-1), values[:, 1:-1:2].reshape(-1)


def reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Returns the metrics of the rewards of pairs, (N,) each."""
    margins = chosen - rejected
    metrics = {"rewards/accuracy": (margins > 0).to(margins.dtype), "rewards/margin": margins}
    return metrics | {"rewards/chosen": chosen, "rewards/rejected": rejected}


def single_terms(loss: KTO, answers: Answers, there: Tensor, rows: Rows) -> Terms:
    """The terms of a loss over single answers, of answers (B, E).

    Raises:
        ForgeError: the reference point is missing.
    """
    assert answers.reference is not None, "KTO uses a reference"
    if loss.wants_mismatched and rows.z is None:
        raise ForgeError(f"loss: batches have no {BASELINE}, which a hook of KTO adds before each step")
    flat = Answers(answers.log_p.reshape(-1), answers.tokens.reshape(-1), answers.reference.reshape(-1))
    kinds, mask = rows.kinds.reshape(-1), there.reshape(-1)
    desirable = kinds == CHOSEN
    z = flat.log_p.new_zeros(len(rows.kinds)) if rows.z is None else rows.z.to(flat.log_p.dtype)
    z = z[:, None].expand_as(rows.kinds).reshape(-1)
    rewards = loss.rewards(flat)
    right = (rewards > 0) == desirable
    logged = {"kto/z": z, "kto/desirable": desirable.to(z.dtype), "rewards/accuracy": right.to(z.dtype)}
    by_kind = {
        "rewards/chosen": (rewards, mask & desirable),
        "rewards/rejected": (rewards, mask & ~desirable),
    }
    return Terms(mask, {loss.metric: (1.0, loss.losses(flat, desirable, z))}, logged, by_kind)


# --- the reference point of KTO --------------------------------------------------------------------------------------


def mismatched(batch: Batch) -> Batch:
    """Returns the rows of prompts with answers to others that belong to the rows of a batch.

    Raises:
        ForgeError: it has none.
    """
    if MISMATCHED not in batch:
        message = f"batches have no {MISMATCHED}, prompts with answers to others, on which KTO estimates z"
        raise ForgeError(f'loss: {message}; take a source of type "pairs", or set loss.estimate_z = false')
    entries = dict(zip(TOKEN_ENTRIES, batch[MISMATCHED].unbind(1), strict=True))
    # An evaluation fills its last batch with rows whose labels are all ignored; these labels are of them, too
    counts = (batch["labels"] != IGNORED_LABEL).any(1)
    entries["labels"] = entries["labels"].where(counts[:, None], IGNORED_LABEL)
    left_out = {*TOKEN_ENTRIES, MISMATCHED, KINDS, REFERENCE, "examples"}
    return {**{name: value for name, value in batch.items() if name not in left_out}, **entries}


def mean_ratio(total: Tensor, batches: Sequence[Batch], mesh: DeviceMesh | None) -> Tensor:
    """(): the mean over examples of log-ratios that add up to `total` () on this rank. Collective."""
    # A copy, as the reduction is in place
    total = mesh_of_run.all_reduce_tokens(total.detach().double().reshape(1).clone(), mesh)
    # An evaluation fills its last batch with rows whose labels are all ignored
    counts = [(batch["examples"] * (batch["labels"] != IGNORED_LABEL).any(1)).sum() for batch in batches]
    # Over samples and not tokens: ranks that divide sequences have the same examples
    count = mesh_of_run.all_reduce_samples(torch.stack(counts).sum().double().reshape(1), mesh)
    return (total / count.clamp(min=1))[0]
