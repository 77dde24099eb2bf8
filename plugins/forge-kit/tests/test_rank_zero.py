"""What rank 0 reads for all ranks, and how its errors reach the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.device_mesh import init_device_mesh

from forge_core.contracts.errors import ForgeError, JobError, Problem
from forge_kit.tools.rank_zero import from_rank0
from forge_testing.processes import run_on_ranks

pytestmark = pytest.mark.slow


def failing(error):
    def describe():
        raise error

    return describe


def test_errors_of_rank_0_reach_the_others_with_their_name_or_their_problems():
    def outcomes(rank):
        context = SimpleNamespace(mesh=init_device_mesh("cpu", (2,)))
        raised = []
        for error in (ValueError("a word"), ValueError(), JobError([Problem("data.path", "is missing")])):
            with pytest.raises(Exception) as caught:  # noqa: PT011
                from_rank0(context, failing(error))
            raised.append((type(caught.value), str(caught.value)))
        return raised, from_rank0(context, lambda: rank)

    (own, first), (others, second) = run_on_ranks(2, outcomes)
    assert [kind for kind, _ in own] == [ValueError, ValueError, JobError]
    assert others[:2] == [(ForgeError, "rank 0: a word"), (ForgeError, "rank 0: ValueError")]
    assert others[2] == own[2]
    assert first == second == 0
