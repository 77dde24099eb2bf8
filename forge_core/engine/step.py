"""One training step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from forge_core.auxiliary import Count
from forge_core.config.mixture import source_names
from forge_core.contracts.contexts import StepContext
from forge_core.contracts.data import IGNORED_LABEL, Batch
from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import ChangesWithUpdates
from forge_core.contracts.runtime import StepOutput
from forge_core.engine.build import Run
from forge_core.parallel import mesh
from forge_core.parallel.initialise import seed_of

AUXILIARY = "auxiliary:"
"""Marks what modules attached among the reduced sums."""

SOURCE_LOSS = "loss/source/"
"""Prefix of a source's name. Not `loss/` alone, which prefixes the terms of a loss: a source may have any name."""

WAITED = "waited"
"""Name, among the reduced sums, of the seconds that the slowest rank waited for the data of the step."""

ABSENT = -math.inf
"""The loss of a source without a valid token in a step, which only the device can detect. The line omits it."""

Sums = Mapping[str | Count, Tensor]
"""Totals of a step over the token ranks: sums (), and what modules counted (n,)."""


class Stepper:
    """Runs steps: gradients of the global batch, their norm, the update."""

    def __init__(self, run: Run) -> None:
        self._run, self._job, self._context = run, run.job, run.context
        self._mesh, layout = run.context.mesh, run.context.layout
        self._parameters = [item.parameter for item in run.parameters]
        # Another rank of a pipeline counts these: the norm is over distinct parameters, and a tied one is one.
        elsewhere = {id(parameter) for stage in run.built_stages for parameter in stage.counted_elsewhere(run.model)}
        self._counted = [parameter for parameter in self._parameters if id(parameter) not in elsewhere]
        self._pipeline = mesh.pipeline_group(self._mesh)
        self._attached: dict[float, dict[str | Count, torch.Size]] = {}
        self._changing = [module for module in run.model.modules() if isinstance(module, ChangesWithUpdates)]
        self._source_names = source_names(run.job)
        key = hashlib.blake2b(f"{run.job.job.seed}:draw".encode(), digest_size=7).digest()
        self._first_draw = int.from_bytes(key, "little")
        self._sample_rank, self._part = mesh.sample_rank(self._mesh, layout), mesh.part_of_step(self._mesh, layout)
        self._first_rank, self._runs = layout.run[0] * layout.data_parallel, layout.run[1]
        self._part += layout.run[0] * layout.world_size  # so that other runs of the same model draw other numbers
        self._masked = self._can_mask()
        self.decides = not self._masked and (run.job.train.non_finite != "ignore" or run.hooks.may_skip)

    def _can_mask(self) -> bool:
        """Whether the optimizer itself leaves out the update, which spares the host a wait: torch's `found_inf`."""
        supported = bool(getattr(self._run.optimizer, "_step_supports_amp_scaling", False))
        on_device = all(parameter.device.type != "cpu" for parameter in self._parameters)  # else nothing to wait for
        return self._job.train.non_finite == "skip" and supported and on_device and not self._run.hooks.may_skip

    def waits(self) -> str:
        """The host's wait for the device in each step, for the summary of the run."""
        if not self.decides:
            return "none"
        reason = "a hook may skip it" if self._run.hooks.may_skip else f'non_finite = "{self._job.train.non_finite}"'
        return f"one, to decide on the update ({reason})"

    def gradients(self, batches: Sequence[Batch], step: int, waited: float = 0.0) -> tuple[StepOutput, Sums]:
        """Gradients of the whole step, complete on every rank; also the reduced sums that metrics are made of.

        `waited`: seconds that this rank has waited for the batches.
        """
        # Before anything draws: dropout then depends on nothing earlier, and no generator is part of a checkpoint.
        seed_step(self._job.job.seed, step, self._part, self._context.device)
        batches = self._with_draws(batches, step)
        # Before the first forward pass: each loss is divided by the global count before its backward pass, so that
        # every reduction of gradients is a plain sum, and micro-batches weigh by their tokens under every layout.
        tokens, examples, documents, longest_wait, runs = self._facts_of_step(batches, waited)
        # From the batches: their number and their rows differ from step to step, and a hook may have divided rows.
        layout, rows = self._context.layout, sum(len(batch["labels"]) for batch in batches)
        auxiliary, count = self._context.auxiliary, len(batches) * layout.token_ranks * runs
        auxiliary.begin_step(tokens, rows * layout.data_parallel * runs, count, examples, documents)
        dtype = torch.float64 if self._context.dtype == torch.float64 else torch.float32
        # Clamped: a step whose labels are all ignored has gradients of 0 and not of NaN.
        output = self._run.executor.train_step(batches, tokens.clamp(min=1).to(dtype))
        largest = self._largest(auxiliary.largest())
        sums = {**self._reduce(output, batches, auxiliary.totals()), **largest, WAITED: longest_wait}
        auxiliary.end_step({name: value for name, value in sums.items() if isinstance(name, Count)})
        # Last stage first, as the backward pass goes. In a pipeline, `fsdp`, applied last, makes the sharded gradients
        # only here; `tp` and `pp`, applied before it, sum these over their own ranks and must find them.
        for stage in reversed(self._run.built_stages):
            stage.complete_gradients(self._run.model)
        return output, sums

    def _with_draws(self, batches: Sequence[Batch], step: int) -> list[Batch]:
        """The micro-batches with `draw` (B,), a number per sequence and step, the same in every layout, for noise."""
        sizes = [len(batch["input_ids"]) for batch in batches]
        of_step = self._first_draw + self._job.train.sample_after(step)
        first = of_step + (self._first_rank + self._sample_rank) * sum(sizes)
        draws = torch.arange(first, first + sum(sizes), device=self._context.device).split(sizes)
        pairs = zip(batches, draws, strict=True)
        # Rows that were redistributed by cost come from other slots, and take the noise of these slots with them.
        return [{**batch, "draw": batch["slots"] + of_step if "slots" in batch else draw} for batch, draw in pairs]

    def norm(self) -> Tensor:
        """The global norm of the complete gradient, before clipping."""
        return global_norm(self._counted, self._pipeline)

    def update(self, context: StepContext, loss_sum: Tensor) -> Tensor | None:
        """Clip and step, unless the update must be skipped; returns whether it was, if only the device can tell."""
        assert context.grad_norm is not None
        # Both were summed over the ranks, so a NaN of one rank is one of all, and all decide alike without a message.
        finite = torch.isfinite(loss_sum) & torch.isfinite(context.grad_norm)
        context.skipped = None if self._masked else self._must_skip(context, finite)
        if not context.skipped:
            self._optimizer_step(context.grad_norm, finite)
            self._change_buffers(finite)
        self._run.optimizer.zero_grad(set_to_none=True)  # frees their memory for the activations of the next step
        return ~finite if self._masked else None

    def _must_skip(self, context: StepContext, finite: Tensor) -> bool:
        if not self.decides:
            return False
        if self._job.train.non_finite != "ignore" and not finite.item():  # the one wait of a step
            return True  # on all ranks, which know it by themselves
        alone, requests = self._context.layout.world_size == 1, context.requests
        if self._run.hooks.may_skip and not alone:  # hooks may ask on some ranks, and all must do the same
            requests.skip = agreed_reason(requests.skip) if mesh.any_rank([bool(requests.skip)])[0] else ""
        return bool(requests.skip)

    def _optimizer_step(self, norm: Tensor, finite: Tensor) -> None:
        optimizer = self._run.optimizer
        if self._job.train.grad_clip_norm:  # by the norm of complete gradients; clipped parts would not add up to it
            clip(self._parameters, norm, self._job.train.grad_clip_norm)
        if self._masked:
            optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
        optimizer.step()

    @torch.no_grad()
    def _change_buffers(self, finite: Tensor) -> None:
        """After the update: a router's bias, say, belongs to the weights that come next."""
        if self._masked:  # whether there was an update is known on the device only: counts of a skipped one become 0
            self._context.auxiliary.forget_counted_unless(finite)
        for module in self._changing:
            module.after_update()

    def _facts_of_step(self, batches: Sequence[Batch], waited: float) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """Valid tokens, examples and documents of the global batch, the longest wait for it, the runs that share it."""
        counts = [(batch["labels"] != IGNORED_LABEL).sum() for batch in batches]
        examples = [batch["examples"].sum() if "examples" in batch else len(batch["labels"]) for batch in batches]
        # A place for each rank, so that the sum over ranks has all their waits; counts are exact up to 2^53
        context = self._context
        facts = torch.zeros(3 + context.layout.data_parallel, dtype=torch.float64, device=context.device)
        facts[0], facts[1], facts[2] = torch.stack(counts).sum(), sum(examples), sum(map(_documents, batches))
        facts[3 + self._sample_rank] = waited
        # Over samples and not tokens: sequences are still whole here, and `cp` ranks have the same ones.
        mesh.all_reduce_samples(facts, self._mesh)
        runs = self._over_runs(facts[:3])
        return facts[0].long(), facts[1], facts[2], facts[3:].max(), runs

    def _over_runs(self, sums: Tensor) -> int:
        return max((stage.sum_over_runs(sums) for stage in self._run.built_stages), default=1)

    def _reduce(self, output: StepOutput, batches: Sequence[Batch], attached: Sums) -> Sums:
        """One collective, as many would cost their latency: loss, counts, losses by source, what modules attached."""
        parts: dict[str | Count, Tensor] = {"loss_sum": output.loss_sum, "count": output.count}
        if len(self._source_names) > 1 and "sources" in batches[0]:
            sources = torch.cat([batch["sources"] for batch in batches])
            sums, counts = output.per_sequence
            zeros = torch.zeros(len(self._source_names), dtype=sums.dtype, device=sums.device)
            parts["source_sums"] = zeros.index_add(0, sources, sums)
            parts["source_counts"] = zeros.index_add(0, sources, counts.to(sums.dtype))
        of_layers = self._over_layers(attached).items()
        parts |= {name if isinstance(name, Count) else f"{AUXILIARY}{name}": value for name, value in of_layers}
        return _together(parts, lambda flat: self._over_runs(mesh.all_reduce_tokens(flat, self._mesh)))

    def _over_layers(self, attached: Sums) -> Sums:
        """The metrics attached by modules, summed over the pipeline's ranks, whose modules attach different names."""
        of_all = self._of_all_layers(attached, 0.0)
        if self._pipeline is None or not of_all:
            return of_all
        return _together(of_all, partial(torch.distributed.all_reduce, group=self._pipeline))

    def _largest(self, attached: Sums) -> Sums:
        """The largest values over all ranks of what modules attached, in one collective."""
        of_all = self._of_all_layers(attached, -torch.inf)
        if of_all and self._runs > 1:
            raise ForgeError(f"{next(iter(of_all))} is the largest value of this run, not of all {self._runs} runs")
        if not of_all or self._context.layout.world_size == 1:
            return of_all
        return _together(of_all, partial(torch.distributed.all_reduce, op=torch.distributed.ReduceOp.MAX))

    def _of_all_layers(self, attached: Sums, empty: float) -> Sums:
        """What modules attached, and `empty` for what those of other pipeline ranks attach; one order on all ranks."""
        if self._pipeline is None:
            return attached
        if empty not in self._attached:  # once: gathering objects in every step would cost more than the sums
            known = mesh.gather_objects({name: value.shape for name, value in attached.items()}, self._pipeline)
            every = {name: shape for part in known for name, shape in part.items()}
            names = sorted(every, key=lambda name: (isinstance(name, Count), name))
            self._attached[empty] = {name: every[name] for name in names}
        shapes = self._attached[empty]
        if new := sorted(map(str, attached.keys() - shapes.keys())):
            raise ForgeError(
                f"{new[0]} was first attached after the first step; in a pipeline, all must be in the first"
            )
        like = partial(torch.full, fill_value=empty, dtype=torch.float64, device=self._context.device)
        return {name: attached[name] if name in attached else like(shape) for name, shape in shapes.items()}


def _documents(batch: Batch) -> Tensor | int:
    """Documents of a micro-batch, those of each row."""
    rows, ids = len(batch["labels"]), batch.get("document_ids")
    return rows if ids is None else rows + (ids[:, 1:] != ids[:, :-1]).sum()


def agreed_reason(own: str) -> str:
    """This rank's reason for the request, or else the reason of the first rank that has one. Collective."""
    reasons = mesh.gather_objects(own)
    return own or next((f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason), "")


def _together(parts: Sums, reduce: Callable[[Tensor], object]) -> Sums:
    """The parts after `reduce`, which works in place on all of them as one vector.

    In float64: counts of tokens and sums of losses stay exact where float32 would round them.
    """
    flat = torch.cat([part.detach().double().reshape(-1) for part in parts.values()])
    reduce(flat)
    pieces = flat.split([part.numel() for part in parts.values()])
    return {name: piece.view(part.shape) for (name, part), piece in zip(parts.items(), pieces, strict=True)}


def global_norm(parameters: Collection[nn.Parameter], stages: ProcessGroup | None = None) -> Tensor:
    """2-norm of all gradients over all ranks, `stages` being a pipeline's ranks; a device scalar, at least float32."""
    # Not by DTensor, which would reduce each parameter by itself: here one reduction serves all that are split alike.
    split: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            split.setdefault(_groups(parameter.grad), []).append(mesh.local_part(parameter.grad))
    first = mesh.local_part(next(iter(parameters)))
    # In the dtype that other pipeline ranks reduce, also on one of which nothing trains.
    total = first.new_zeros((), dtype=torch.promote_types(first.dtype, torch.float32))
    for groups, gradients in split.items():
        norms = torch._foreach_norm(gradients, 2, torch.promote_types(gradients[0].dtype, torch.float32))
        square = torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum()
        for group in groups:
            torch.distributed.all_reduce(square, group=group)
        total = total + square
    if stages is not None:
        torch.distributed.all_reduce(total, group=stages)
    return total.sqrt()


def _groups(gradient: Tensor) -> tuple[ProcessGroup, ...]:
    if not isinstance(gradient, DTensor):
        return ()
    placements = enumerate(gradient.placements)
    return tuple(gradient.device_mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients down so that their global norm, which is `norm`, becomes at most `max_norm`; in place.

    An infinite norm makes them 0, and NaN where they are infinite, as `torch.nn.utils.clip_grad_norm_` does; a norm of
    NaN leaves them as they are. Such a step is for the non-finite policy to skip, and with `ignore` it is lost.
    """
    factor = (max_norm / norm.clamp(min=max_norm)).nan_to_num(1.0)
    groups: dict[tuple[Any, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local = mesh.local_part(parameter.grad)
            groups.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), gradients in groups.items():
        torch._foreach_mul_(gradients, factor.to(device=device, dtype=dtype))


def metrics(sums: Sums, source_names: Sequence[str] = ()) -> dict[str | Count, Tensor]:
    """For a step's line, on the device: means made of the reduced sums, and what was counted."""
    scalars: dict[str | Count, Tensor] = {"loss": sums["loss_sum"] / sums["count"].clamp(min=1)}
    if "source_sums" in sums:
        counts = sums["source_counts"]
        means = torch.where(counts > 0, sums["source_sums"] / counts.clamp(min=1), ABSENT)
        scalars |= {SOURCE_LOSS + name: mean for name, mean in zip(source_names, means, strict=True)}
    attached = {n.removeprefix(AUXILIARY): v for n, v in sums.items() if isinstance(n, str) and n.startswith(AUXILIARY)}
    return scalars | attached | {name: value for name, value in sums.items() if isinstance(name, Count)}


def seed_step(seed: int, step: int, part: int, device: torch.device) -> None:
    """Seed the default generators from (seed, step, part of the step), so that a step does not depend on history.

    Ranks that compute the same tokens in the same layers have the same part: together they must draw the same.
    """
    number = seed_of(f"{seed}:step:{step}:{part}")
    # Not `torch.manual_seed`: without CUDA it keeps a note, with a traceback, of every call until CUDA starts.
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)
