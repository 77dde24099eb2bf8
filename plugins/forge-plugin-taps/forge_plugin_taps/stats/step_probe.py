"""What a sampled step shows on its way: extremes of logits, and the peak of memory by phase.

Shapes: T positions of a micro-batch, D model width, V vocabulary (this rank's slice of it where it is split).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_core.contracts.model import Head, Model
from forge_core.devices import query_device
from forge_core.parallel.mesh import world_size
from forge_plugin_taps.stats.training_stats import PHASES

CHUNK = 1 << 22
"""Logits that are computed at a time, so that a loss in chunks does not meet all of them after all."""
PEAK = "allocated_bytes.all.peak"


class StepProbe:
    """Looks at the model's last hidden states and its head for the length of a step's passes."""

    # Not by hooks of modules: losses call `logits` and `whole` of a head, and may never call the module itself
    def __init__(self, model: Model, device: torch.device, logits: bool) -> None:
        """Replace methods of the model and its head, until `leave`.

        Args:
            model: after all stages, or this rank's part of it.
            device: of the run.
            logits: whether logits are computed; else only memory is looked at.
        """
        self._model, self._device, self._logits = model, device, logits
        self._hidden: Tensor | None = None
        self._largest = torch.full((), -torch.inf, device=device, dtype=torch.float64)
        self._sums = torch.zeros(2, device=device, dtype=torch.float64)
        self._peaks = dict.fromkeys(PHASES, 0.0) if query_device(device, "memory_stats") else {}
        """Bytes; on a rank of a pipeline without the end of the model, 0 for `forward`."""
        self._stack = ExitStack()
        self._replace(model, "finish", self._finish(model.finish))
        # On other ranks of a pipeline the head is absent
        if logits and isinstance(model.head, Head):
            self._replace(model.head, "whole", self._whole(model.head))

    def leave(self) -> None:
        """Put the methods back, and note the peak of the backward pass."""
        self._stack.close()
        self._hidden = None
        self._note_peak("backward")

    def over_ranks(self) -> dict[str, Tensor]:
        """Numbers of the step, by name, at its end. Collective."""
        self._note_peak("optimizer")
        peaks = torch.tensor([*self._peaks.values()], dtype=torch.float64).to(self._device, non_blocking=True)
        largest = torch.cat([self._largest.reshape(1), peaks])
        if world_size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        numbers = {
            f"memory/{name}_gb": peak / 1e9 for name, peak in zip(self._peaks, largest[1:].unbind(), strict=True)
        }
        if self._logits:
            # Ranks with equal logits add them equally often to both sums, so that no layout is asked for
            if world_size() > 1:
                dist.all_reduce(self._sums)
            square, count = self._sums.unbind()
            highest = largest[0].where(count > 0, torch.nan)
            numbers |= {"logits/max": highest, "logits/rms": (square / count).sqrt()}
        return numbers

    def _replace(self, owner: Any, name: str, method: Any) -> None:
        # A stage may have put another method into the object, which must come back, and not the method of the class
        before = vars(owner).get(name)
        setattr(owner, name, method)
        if before is None:
            self._stack.callback(delattr, owner, name)
        else:
            self._stack.callback(setattr, owner, name, before)

    def _note_peak(self, phase: str) -> None:
        # The run loop has reset it at the end of the step before, and reads it at the end of this one: no reset here
        if self._peaks:
            self._peaks[phase] = float(query_device(self._device, "memory_stats")[PEAK])

    def _finish(self, finish: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Tensor:
            hidden: Tensor = finish(*args, **kwargs)
            if not self._peaks.get("forward"):
                self._note_peak("forward")
            if self._logits and torch.is_grad_enabled():
                self._hidden = hidden.detach()
            return hidden

        return noted

    def _whole(self, head: Head) -> Any:
        whole = head.whole

        @contextmanager
        def measured(dtype: torch.dtype | None = None) -> Iterator[Sequence[Tensor]]:
            with whole(dtype) as weights:
                # Once for each micro-batch: further predictions of a model enter the head again
                hidden, self._hidden = self._hidden, None
                if hidden is not None:
                    self._measure(head, hidden.flatten(0, -2))
                yield weights

        return measured

    @torch.no_grad()
    def _measure(self, head: Head, hidden: Tensor) -> None:
        """Add the logits of hidden states (T, D), which the loss computes by itself, in whatever way."""
        rows = max(1, CHUNK // max(1, self._columns(head)))
        for part in hidden.split(rows):
            logits = head.logits(part).abs()
            largest = logits.amax().double()
            self._largest = torch.maximum(self._largest, largest)
            norm = torch.linalg.vector_norm(logits, dtype=torch.promote_types(logits.dtype, torch.float32))
            self._sums += torch.stack([norm.double().square(), torch.full_like(largest, logits.numel())])

    def _columns(self, head: Any) -> int:
        """About how many logits a position has: the rows of the largest weight."""
        return max((len(parameter) for parameter in head.parameters()), default=1)
