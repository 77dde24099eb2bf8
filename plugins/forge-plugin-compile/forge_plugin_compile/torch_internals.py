"""Everything private to torch that the compiling stage uses: settings of the compiler, which has no public ones.

`tests/test_torch_internals.py` names the one that another torch has changed.
"""

from __future__ import annotations

import torch
import torch._dynamo


def allow_graphs(count: int) -> None:
    """Raise torch's limits on recompilation to `count`.

    Blocks that differ in a constant do not share a graph, and torch counts the graphs of all blocks against one limit
    of 8. The limit is there to stop code that recompiles at every step, and still does, if later.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)


def allow_counters_under_recomputation() -> None:
    """Let torch trace the creation of counters inside a checkpointed block.

    Experts create their counters in their first forward pass. Torch refuses such a side effect under recomputation,
    because recomputing would skip it; skipping it is correct here, as a pass is counted once.
    """
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def keep_random_numbers() -> None:
    """Draw dropout's numbers from torch's own generator, so that losses are the same as without compilation."""
    import torch._inductor.config

    torch._inductor.config.fallback_random = True


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number of the memory that a tensor is a view of; unlike an address, fake tensors have one too."""
    number: int = tensor.untyped_storage()._cdata
    return number
