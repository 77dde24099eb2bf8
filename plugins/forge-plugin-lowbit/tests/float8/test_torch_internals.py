"""The private names of torch that float8 uses: the test names one that another torch has changed."""

from __future__ import annotations

import inspect

from forge_plugin_lowbit.float8 import torch_internals


def test_the_sum_over_ranks_takes_a_kind_and_a_group():
    assert list(inspect.signature(torch_internals.all_reduce).parameters)[:3] == ["self", "reduceOp", "group"]
    assert list(inspect.signature(torch_internals.wait_tensor).parameters) == ["tensor"]
