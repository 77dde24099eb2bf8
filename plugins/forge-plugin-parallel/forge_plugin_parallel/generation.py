"""Generation by the ranks of each stage: see `forge_kit.nn.generation`.

Shapes: B rows, S new positions of each, D model width, V the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError
from forge_kit.nn.generation import JointGeneration, whole_logits

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry, Model
    from forge_plugin_parallel.cuts import Section
    from forge_plugin_parallel.pp_stage import Pipeline
    from forge_plugin_parallel.tp_ways import Ranks

Form = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a tensor that is received."""


class ShardedGeneration(JointGeneration):
    """For `fsdp`: ranks gather parameters together, and each generates different rows."""

    def __init__(self, model: Model, units: Sequence[FSDPModule], group: dist.ProcessGroup) -> None:
        super().__init__(model)
        self._units, self._group = units, group

    def next_logits(self, batch: Batch, cache: Any) -> Tensor:
        """Collective, as it gathers the units; frees all of them afterwards, even after an error."""
        try:
            return self.inner.next_logits(batch, cache)
        finally:
            # Only a backward pass frees the root, and the next update would leave it as it is, with stale weights.
            for unit in self._units:
                unit.reshard()

    def all_done(self, done: bool) -> bool:
        """Collective: a minimum over the ranks, which end together."""
        # A rank that stopped would leave the others waiting for its shards.
        # NCCL reduces on GPUs alone
        device = next(self.model.parameters()).device if dist.get_backend(self._group) == "nccl" else "cpu"
        flag = torch.tensor(int(self.inner.all_done(done)), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._group)
        return bool(flag)


class SameRows(JointGeneration):
    """Of `tp` and `cp`: ranks compute the same rows, in collectives that the modules hold, or each by itself."""

    shares_rows = True


class WholeSequences:
    """Replaces `Model.decode` under sequence parallel: positions are decoded one at a time, so no rank has a part."""

    def __init__(self, decode: Callable[[Batch, Any], Tensor], ranks: Ranks) -> None:
        self._decode, self._ranks = decode, ranks

    def __call__(self, batch: Batch, cache: Any) -> Tensor:
        divided, self._ranks.sequence_parallel = self._ranks.sequence_parallel, False
        try:
            return self._decode(batch, cache)
        finally:
            self._ranks.sequence_parallel = divided


class OwnMixers:
    """Replaces `Model.decode` under context parallel: with the model's own mixers, as every rank has all positions."""

    def __init__(self, decode: Callable[[Batch, Any], Tensor], own: Mapping[tuple[nn.Module, str], nn.Module]) -> None:
        """`own`: the mixers that the stage has replaced, by the module that holds each, and its name there."""
        self._decode, self._own = decode, dict(own)

    def __call__(self, batch: Batch, cache: Any) -> Tensor:
        replaced = {place: getattr(*place) for place in self._own}
        _put(self._own)
        try:
            return self._decode(batch, cache)
        finally:
            _put(replaced)


def _put(modules: Mapping[tuple[nn.Module, str], nn.Module]) -> None:
    for (parent, key), module in modules.items():
        setattr(parent, key, module)


class SectionDecode:
    """Replaces `Model.decode` in a pipeline: the model's own, over the layers of one section.

    The model's own code decodes, whatever else it does: on a later section `embed` returns the carry that was
    received, and on an earlier one `finish` returns the carry to be sent.
    """

    def __init__(self, model: Any, decode: Callable[[Batch, Any], Any]) -> None:
        self._model, self._decode = model, decode
        self.section: Section | None = None
        """The section that is being decoded; None outside of a generation."""
        self.carry: Carry = ()

    def __call__(self, batch: Batch, cache: Any) -> Any:
        if self.section is None:
            raise ForgeError(
                "no rank of a pipeline has the whole model, so it cannot generate by `decode` alone; "
                "call forge_kit.nn.generation.joint_generation(model).next_logits on every rank"
            )
        with _only(self._model, self.section, self.carry):
            return self._decode(batch, cache)


class PipelinedGeneration(JointGeneration):
    """Of `pp`: positions pass through the sections, and the last rank's logits are broadcast."""

    shares_rows = True

    def __init__(self, model: Model, pipeline: Pipeline, decode: SectionDecode) -> None:
        super().__init__(model)
        self._pipeline, self._decode = pipeline, decode
        self._forms: dict[tuple[Any, ...], list[Form]] = {}
        self._entries: tuple[str, ...] = ()
        """Names of the entries of the batch that is being decoded, by which a carry may have more tensors."""

    def next_logits(self, batch: Batch, cache: Any) -> Tensor:
        """Collective: runs this rank's sections in order; the last rank then broadcasts the logits."""
        # Images too are read by every section: the first one encodes them, others may mask by where they stand.
        self._entries = tuple(sorted(batch))
        owners, rank, shape = self._pipeline.owners, self._pipeline.rank, batch["input_ids"].shape
        state: Any = ()
        for number, section in enumerate(self._pipeline.sections):
            if owners[number] != rank:
                continue
            # Neighbouring sections on one rank (schedules in a V) pass the carry on without sending it.
            if number and owners[number - 1] != rank:
                state = self._receive(number, shape)
            state = self._section(section, batch, cache, state)
            if not section.last and owners[number + 1] != rank:
                self._send(number + 1, shape, state)
        return self._shared(state, shape)

    def cache_limits(self) -> set[int]:
        """Collective: the union of the limits of all ranks' sections."""
        # Sections may have different kinds of layers: all start over at the same token, as they pass on equal shapes.
        return set().union(*self._everyones(self.inner.cache_limits()))

    def joins_rows(self, cache: Any) -> bool:
        """Collective: true if it is on every rank."""
        return all(self._everyones(self.inner.joins_rows(cache)))

    def _everyones(self, own: Any) -> list[Any]:
        """Returns what each rank of the pipeline has."""
        values: list[Any] = [None] * dist.get_world_size(self._pipeline.group)
        dist.all_gather_object(values, own, group=self._pipeline.group)
        return values

    def _section(self, section: Section, batch: Batch, cache: Any, carry: Carry) -> Any:
        decode, model = self._decode, self.model
        decode.section, decode.carry = section, carry
        try:
            return model.decode(batch, cache)  # type: ignore[operator]  # with what later stages have put around it
        finally:
            decode.section, decode.carry = None, ()

    def _send(self, number: int, shape: torch.Size, carry: Carry) -> None:
        """Send the carry to the rank of the next section; its forms too, the first time for this shape of a batch."""
        group, to = self._pipeline.group, self._pipeline.owners[number]
        if (key := ("carry", number, shape, self._entries)) not in self._forms:
            self._forms[key] = forms = [(tensor.shape, tensor.dtype) for tensor in carry]
            dist.send_object_list([forms], group=group, group_dst=to)
        for tensor in carry:
            dist.send(tensor.contiguous(), group=group, group_dst=to)

    def _receive(self, number: int, shape: torch.Size) -> Carry:
        group, source = self._pipeline.group, self._pipeline.owners[number - 1]
        if (key := ("carry", number, shape, self._entries)) not in self._forms:
            forms: list[Any] = [None]
            dist.recv_object_list(forms, group=group, group_src=source)
            self._forms[key] = forms[0]
        carry = self._empty(key)
        for tensor in carry:
            dist.recv(tensor, group=group, group_src=source)
        return carry

    def _shared(self, hidden: Any, shape: torch.Size) -> Tensor:
        """Returns the logits (B, V) on every rank, from the hidden states (B, S, D) of the last one."""
        last, key = self._pipeline.owners[-1], ("logits", 0, shape[:1])
        own = whole_logits(self.model.head, hidden[:, -1:])[:, 0] if self._pipeline.rank == last else None
        if key not in self._forms:
            forms: list[Any] = [None if own is None else [(own.shape, own.dtype)]]
            dist.broadcast_object_list(forms, group=self._pipeline.group, group_src=last)
            self._forms[key] = forms[0]
        # Broadcast, not computed on each rank: equal bits, from which all draw the same tokens
        logits = self._empty(key)[0] if own is None else own.contiguous()
        dist.broadcast(logits, group=self._pipeline.group, group_src=last)
        return logits

    def _empty(self, key: tuple[Any, ...]) -> Carry:
        device = next(self.model.parameters()).device
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._forms[key])


@contextmanager
def _only(model: Any, section: Section, carry: Carry) -> Iterator[None]:
    """A context in which the model consists of one section of the layers that this rank has."""
    # An earlier stage may have set these on the object: they are put back, and not only removed
    own = {name: vars(model)[name] for name in ("embed", "finish") if name in vars(model)}
    layers = model.layers
    if not section.first:
        model.embed = lambda batch: carry
    if not section.last:
        model.finish = lambda carry, batch: carry
    model.layers = nn.ModuleDict({name: layers[name] for name in section.layers})
    try:
        yield
    finally:
        model.layers = layers
        for name in ("embed", "finish"):
            vars(model).pop(name, None)
        vars(model).update(own)
