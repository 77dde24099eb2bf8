"""Everything private to torch that float8 uses; `tests/test_torch_internals.py` names what a torch has changed."""

from __future__ import annotations

# A sum over ranks that torch.compile traces into the graph; at `torch.distributed.all_reduce`, which works in place, it
# cuts a compiled block in two. `wait_tensor` waits for the result.
from torch.distributed._functional_collectives import all_reduce, wait_tensor

__all__ = [
    "all_reduce",
    "wait_tensor",
]
