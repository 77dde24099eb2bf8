"""Everything private to torch that the parallel stages use, beside `forge_kit.torch_internals`.

`tests/test_torch_internals.py` names the one that another torch has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils.checkpoint import GraphExecGroup

SLOW_OPERATORS = frozenset(
    {
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
)
"""Operators that only the dispatcher names: products in float8, the kernels of attention, and one collective."""


def is_view(tensor: Tensor) -> bool:
    """Returns whether a tensor is a view, which autograd refuses to detach in place."""
    return tensor._is_view()


@contextmanager
def shards_of_numbers_train() -> Iterator[None]:
    """A context in which FSDP can divide parameters that are bytes, and train as little as other frozen ones.

    torch 2.11 makes each shard a parameter with a gradient and then sets it as the parameter was, which bytes refuse.

    It needs of torch that FSDP makes parameters by `nn.Parameter` in the module `_fsdp_param`.
    """
    own = _fsdp_param.nn  # type: ignore[attr-defined]
    _fsdp_param.nn = _Modules()  # type: ignore[assignment,attr-defined]
    try:
        yield
    finally:
        _fsdp_param.nn = own  # type: ignore[attr-defined]


class _Modules:
    """`torch.nn` with another `Parameter`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    @staticmethod
    def Parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:  # noqa: N802
        """As torch's, of numbers."""
        return nn.Parameter(data, requires_grad and data.is_floating_point())


class Stage(pipelining.PipelineStage):
    """A stage whose receive buffers exist only from the receive operation to the end of the computation on them.

    torch's own allocates buffers for activations and gradients of all micro-batches in the first step and never frees
    them: 28 GB for DeepSeek-V3 with 240 micro-batches of 4,096 positions. Here tensors on the device `meta` stand in
    for buffers that are not in use.

    It needs of torch that both `_prepare` methods allocate all receive buffers on `self.device`, as `buffer` of what
    `args_recv_info` and `grad_recv_info` list.
    """

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        # Only torch 2.11 and older call it, also on the last stage, whose outputs are no carry as `output_args` has it.
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocates the micro-batch's buffers for activations: from here on they are in use."""
        _move(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocates the micro-batch's buffers for gradients, if it receives any."""
        _move(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        """Returns torch's operations, with zeros for gradients that are None."""
        # torch 2.11 refuses to send a gradient that is None, where 2.13 sends zeros.
        if not hasattr(self, "_get_grad_send_meta") and bwd_chunk_id in self.bwd_cache:
            pairs = zip(self.bwd_cache[bwd_chunk_id], self.args_recv_info[bwd_chunk_id], strict=False)
            self.bwd_cache[bwd_chunk_id] = tuple(self._sent(grad, info) for grad, info in pairs)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def _sent(self, grad: Tensor | None, received: Any) -> Tensor | None:
        buffer = getattr(received, "buffer", None)
        if grad is not None or buffer is None:
            return grad
        return torch.zeros_like(buffer, device=self.device, requires_grad=False)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Allocates the buffers that gradients of a next stage on this same rank are copied to."""
        _move(self.grad_recv_info[mb_index], self.device)  # a gradient that is None becomes zeros there
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Drops the received activations after use; what the backward pass needs is held by its graph."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _move(self.args_recv_info[fwd_chunk_id], torch.device("meta"))
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, *args: Any, **kwargs: Any) -> None:
        """Drops the received gradients, and the graph of the loss, after use."""
        super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        if loss is not None:
            # torch's schedules hold all losses of a step, and the graph of a loss holds the stage's received tensors.
            loss.detach_()
        _move(self.grad_recv_info.get(bwd_chunk_id, ()), torch.device("meta"))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Computes the gradients of weights of a split backward pass, with a single recomputation."""
        # torch computes the gradients of one group of weights after the other, and a checkpointed block would be
        # recomputed for each: eight times for a block with experts, once in a group of executions.
        with GraphExecGroup():
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


def _move(received: Iterable[Any], device: torch.device) -> None:
    """Replace receive buffers by new tensors of the same shape on `device`."""
    for info in received:
        if (old := getattr(info, "buffer", None)) is not None:
            info.buffer = torch.empty_like(old, device=device, requires_grad=old.requires_grad)
