"""What one rank finds out for all: on a file system of a network each look at a file is a message to one server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from forge_core.contracts.errors import ForgeError, JobError
from forge_core.launch.world import join_world

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext

T = TypeVar("T")


def is_checked_elsewhere() -> bool:
    """Whether rank 0 looks at the files of the job for this process, which is another rank of the same run.

    For `problems` of components, which each rank is asked for: what rank 0 finds there ends all ranks.
    """
    try:
        return join_world().rank > 0
    except JobError:  # variables that no launcher sets; named where ranks join
        return False


def from_rank0(context: BuildContext, describe: Callable[[], T]) -> T:
    """Returns what `describe` returns on rank 0, which alone calls it. Collective in a run of several ranks.

    Args:
        context: of a `build`, which all ranks of a run call in the same order.
        describe: returns what can be pickled. It reports progress where it may take long, as the others wait.

    Raises:
        ForgeError: `describe` raised; a `JobError` with the same problems if that was one.
    """
    if context.mesh is None or context.mesh.size() == 1:
        return describe()
    import torch.distributed as dist

    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = describe()
        # Of any kind: the other ranks wait for an outcome
        except Exception as error:
            outcome[1] = error.problems if isinstance(error, JobError) else str(error) or type(error).__name__
            dist.broadcast_object_list(outcome)  # else the others would wait for ever
            raise
    dist.broadcast_object_list(outcome)
    result, fault = outcome
    if fault is not None:
        raise JobError(fault) if isinstance(fault, list) else ForgeError(f"rank 0: {fault}")
    return result
