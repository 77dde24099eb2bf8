"""Tensors that autograd saves, moved to the host and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from forge_core.parallel.mesh import local_part
from forge_kit.torch_internals import FakeTensor
from forge_plugin_compile.torch_internals import storage_of

NO_STREAMS = ("cpu", "meta")
"""Devices whose copies end before the next operation begins."""
PLAIN: tuple[type, ...] = (Tensor, FakeTensor)
"""Types of tensors that move. Others, such as float8's, have parts that only they can copy."""


@frozen
class Offloaded:
    """A forward pass of a block, whose saved tensors wait on the host."""

    forward: Callable[..., Any]
    mover: Mover
    block: nn.Module
    """The module that `forward` belongs to."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # nothing is saved
            return self.forward(*args, **kwargs)
        saved = SavedOfBlock(self.mover, self.block)
        with saved_tensors_hooks(saved.pack, unpack):
            return self.forward(*args, **kwargs)


class Mover:
    """Copies between a device and the host.

    Args:
        device: of the run.
        least: bytes of the smallest tensor that moves.
    """

    def __init__(self, device: torch.device, least: int) -> None:
        self.least = least
        self._device = device
        # Made at the first copy: a stream belongs to a process, and this one may be forked before
        self._stream: Any = None

    def aside(self) -> AbstractContextManager[Any]:
        """A context whose copies run beside the computation, after what was computed so far."""
        if self._device.type in NO_STREAMS:
            return nullcontext()
        module = torch.get_device_module(self._device)
        if self._stream is None:
            self._stream = module.Stream(self._device)
        self._stream.wait_stream(module.current_stream(self._device))
        context: AbstractContextManager[Any] = module.stream(self._stream)
        return context

    def to_host(self, tensor: Tensor) -> Tensor:
        """Returns a contiguous copy; within `aside`."""
        pinned = self._device.type not in NO_STREAMS
        # Pinned, as only such copies run beside the computation
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        host.copy_(tensor, non_blocking=pinned)
        if pinned:
            tensor.record_stream(self._stream)  # its memory is not used again before the copy ends
        return host

    def done(self) -> Any:
        """Returns an event after the copies so far, or None on a CPU."""
        return None if self._device.type in NO_STREAMS else self._stream.record_event()

    def wait(self, event: Any, tensor: Tensor) -> None:
        """Let the computation wait, on the device, for a copy to end that made `tensor`."""
        if event is not None:
            stream = torch.get_device_module(self._device).current_stream(self._device)
            stream.wait_event(event)
            tensor.record_stream(stream)  # it was allocated on the other stream

    @property
    def device(self) -> torch.device:
        """The run's device."""
        return self._device

    def __deepcopy__(self, memo: object) -> Mover:
        # Copies of a model share the stream, which cannot be copied
        return self


class SavedOfBlock:
    """What one call of a block has saved. All of it returns together, as soon as the first part is needed."""

    def __init__(self, mover: Mover, block: nn.Module) -> None:
        self.mover = mover
        self._block = block
        # Weak: the nodes of the graph own the tensors, and a cycle would live until garbage is collected
        self._waiting: list[weakref.ref[Waiting]] = []
        self._weights: set[int] | None = None

    def pack(self, tensor: Tensor) -> Any:
        """Called by autograd for each tensor that it saves."""
        if not self._moves(tensor):
            # Not the tensor itself: saved by the node that made it, it would never be freed
            return tensor.detach()
        waiting = Waiting(tensor.detach(), self)
        # Weak: what autograd has let go of is not copied back
        self._waiting.append(weakref.ref(waiting))
        return waiting

    def _moves(self, tensor: Tensor) -> bool:
        part = local_part(tensor)
        if type(part) not in PLAIN or type(tensor) not in (*PLAIN, DTensor):
            return False
        if part.nbytes < max(self.mover.least, 1) or part.device.type != self.mover.device.type:
            return False
        # An expanded tensor has one value in many places: it is small, and would come back large
        if any(stride == 0 and size > 1 for stride, size in zip(part.stride(), part.shape, strict=True)):
            return False
        return storage_of(part) not in self._storages_of_weights()

    def _storages_of_weights(self) -> set[int]:
        """Weights stay where they are, and so do views of them: fsdp frees and refills their memory itself."""
        if self._weights is None:  # within the block: around it, fsdp has other parameters in place
            weights = [local_part(weight) for weight in (*self._block.parameters(), *self._block.buffers())]
            self._weights = {storage_of(weight) for weight in weights}
        return self._weights

    def fetch(self) -> None:
        """Start copying everything back that still waits, in the order in which the backward pass will need it."""
        waiting = [each for reference in reversed(self._waiting) if (each := reference()) is not None]
        self._waiting.clear()
        with self.mover.aside():
            for each in waiting:
                each.fetch()


class Waiting:
    """A tensor on the host.

    Its strides are restored: kernels may round differently for another order in memory.
    """

    def __init__(self, tensor: Tensor, saved: SavedOfBlock) -> None:
        self._saved = saved
        part = local_part(tensor)
        self._stride = part.stride()
        self._of_dtensor: tuple[Any, ...] | None = None
        if isinstance(tensor, DTensor):
            self._of_dtensor = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        self._returned: Tensor | None = None
        self._event: Any = None
        self._host: Tensor | None = None
        self._like = (part.shape, part.dtype)
        # Without numbers there is nothing to copy: a plan counts the memory of the device alone
        if not (isinstance(part, FakeTensor) or part.is_meta):
            with saved.mover.aside():
                self._host = saved.mover.to_host(part)

    def fetch(self) -> None:
        """Start the copy to the device; within `Mover.aside`."""
        shape, dtype = self._like
        self._returned = torch.empty_strided(shape, self._stride, dtype=dtype, device=self._saved.mover.device)
        if self._host is not None:
            self._returned.copy_(self._host, non_blocking=True)
        self._event = self._saved.mover.done() if self._host is not None else None

    def get(self) -> Tensor:
        """Returns the tensor on the device. It may be called again, as in a backward pass in two parts."""
        if self._returned is None:
            self._saved.fetch()
        if self._returned is None:  # it returned before
            with self._saved.mover.aside():
                self.fetch()
        part, self._returned = self._returned, None
        assert part is not None
        self._saved.mover.wait(self._event, part)
        if self._of_dtensor is None:
            return part
        mesh, placements, shape, stride = self._of_dtensor
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def unpack(packed: Any) -> Tensor:
    """Called by autograd for what `SavedOfBlock.pack` returned."""
    tensor: Tensor = packed.get() if isinstance(packed, Waiting) else packed
    return tensor
