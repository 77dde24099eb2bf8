"""The settings of torch's compiler that the stage changes: each test names one that another torch has changed."""

from __future__ import annotations

import torch
import torch._dynamo
import torch._inductor.config

from forge_plugin_compile import torch_internals


def test_the_limits_on_recompilation_are_raised_and_never_lowered():
    config = torch._dynamo.config
    with config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        torch_internals.allow_graphs(100)
        assert (config.recompile_limit, config.accumulated_recompile_limit) == (100, 256)


def test_counters_may_be_created_under_recomputation():
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=False):
        torch_internals.allow_counters_under_recomputation()
        assert torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint


def test_random_numbers_are_drawn_by_torchs_own_generator():
    with torch._inductor.config.patch(fallback_random=False):
        torch_internals.keep_random_numbers()
        assert torch._inductor.config.fallback_random
