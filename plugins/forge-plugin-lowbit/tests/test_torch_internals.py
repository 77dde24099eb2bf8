"""The private names of torch that low-bit optimizers use: the test names one that another torch has changed."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters

from forge_plugin_lowbit.torch_internals import mark_dynamic


def test_one_graph_serves_sizes_of_a_dimension_that_is_marked():
    torch._dynamo.reset()
    counters.clear()
    doubled = torch.compile(lambda x: 2 * x, backend="eager")
    for rows in (3, 4, 5):
        x = torch.ones(rows, 2)
        mark_dynamic(x, 0)
        assert doubled(x).shape == (rows, 2)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
