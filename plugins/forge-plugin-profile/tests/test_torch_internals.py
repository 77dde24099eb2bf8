"""The private names of torch that profiles use: each test names one that another torch has changed."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from forge_plugin_profile import torch_internals


def test_a_module_runs_what_is_set_in_the_place_of_its_plain_call():
    module, x = nn.Linear(1, 1), torch.ones(1)
    assert torch_internals.compiled_call(module) is None
    plain = torch_internals.plain_call(module)
    torch_internals.set_compiled_call(module, lambda x: plain(x) * 0 + 5)
    assert module(x).item() == 5
    torch_internals.set_compiled_call(module, None)
    assert module(x).item() == plain(x).item()


def test_a_compiled_module_has_a_call_of_its_own():
    module = nn.Linear(1, 1)
    module.compile(backend="eager")
    assert torch_internals.compiled_call(module) is not None


def test_the_history_of_memory_takes_its_length_and_an_end():
    assert {"enabled", "max_entries"} <= set(inspect.signature(torch.cuda.memory._record_memory_history).parameters)
    assert next(iter(inspect.signature(torch.cuda.memory._dump_snapshot).parameters)) == "filename"
