"""The private names of torch that `forge_kit.torch_internals` uses: each test names one that torch has changed."""

from __future__ import annotations

import inspect

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

PUBLIC = hasattr(FSDPModule, "finalize_backward")


@pytest.mark.skipif(not PUBLIC, reason="torch 2.15 is the first with a public reduction")
@pytest.mark.parametrize("name", ["set_manual_backward_finalization", "finalize_backward"])
def test_fsdp_has_a_public_reduction(name):
    assert callable(getattr(FSDPModule, name))


@pytest.mark.skipif(PUBLIC, reason="this torch has a public reduction")
@pytest.mark.parametrize(
    ("owner", "name"), [(FSDPModule, "_get_fsdp_state"), (FSDPState, "_root_post_backward_final_callback")]
)
def test_fsdp_has_the_callback_of_its_last_backward_pass(owner, name):
    assert list(inspect.signature(getattr(owner, name)).parameters) == ["self"]
