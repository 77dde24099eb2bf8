"""Everything private to torch that Forge's plugins share: names that begin with an underscore.

Each function states what it needs and which versions of torch were seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def defer_reduction(model: FSDPModule) -> None:
    """Leave the reduction of the next backward passes to `reduce_gradients`.

    Args:
        model: the root unit, before the first forward pass of the step. Its `set_requires_gradient_sync` is False for
            these passes, unless each is to reduce what it added.
    """
    # Public from torch 2.15 on, where `reduce_gradients` requires it. Earlier versions have no such mode.
    if hasattr(model, "set_manual_backward_finalization"):
        model.set_manual_backward_finalization(True)


def reduce_gradients(model: FSDPModule) -> None:
    """Reduce the gradients that backward passes have accumulated, wait for them, and free gathered parameters.

    Without such gradients it changes nothing, so it may be called twice.

    Args:
        model: the root unit, on which `defer_reduction` was called before these passes.
    """
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    if hasattr(model, "finalize_backward"):  # public from torch 2.15 on
        model.finalize_backward()
        return
    # Until then FSDP reduces in hooks of the last backward pass only, and nobody can say which one that is while the
    # micro-batches of a pipeline overlap. The callback of its last backward pass reduces the groups that are left.
    # torch's own pipeline stage calls it as well. Seen in 2.11 and 2.13.
    model.set_is_last_backward(True)
    state: Any = model._get_fsdp_state()
    state._root_post_backward_final_callback()
