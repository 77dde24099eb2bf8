"""What training takes, counted on fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forge_plugin_adamw import AdamW
from forge_plugin_parallel.memory import (
    device_memory,
    gradient_bytes,
    host_memory,
    optimizer_bytes,
    parameter_bytes,
    peak_bytes,
    saved_bytes,
    stand_ins,
)
from forge_testing import TinyModel


def test_kept_is_the_result_and_what_the_backward_pass_needs():
    weight = torch.ones(8, 8, requires_grad=True)
    x = torch.ones(4, 8)
    assert saved_bytes(lambda: x @ weight) == 4 * 8 * 4, "the operands were there before"
    assert saved_bytes(lambda: (x @ weight).exp()) == 4 * 8 * 4, "exp keeps its result, and needs no operand"
    assert saved_bytes(lambda: (x @ weight).square()) == 2 * 4 * 8 * 4


def test_views_and_what_is_kept_twice_count_once():
    x = torch.ones(4, 8, requires_grad=True)

    def function():
        y = x + 1
        return y.t() * y.view(8, 4)

    assert saved_bytes(function) == 2 * 4 * 8 * 4


def test_what_is_computed_again_is_not_kept():
    x = torch.ones(4, 8, requires_grad=True)
    function = lambda x: x.exp().sin().cos()  # noqa: E731
    assert saved_bytes(lambda: function(x)) == 3 * 4 * 8 * 4
    assert saved_bytes(lambda: checkpoint(function, x, use_reentrant=False)) == 4 * 8 * 4


def test_the_peak_counts_what_is_freed_again():
    x = torch.ones(16)
    assert peak_bytes(lambda: (x + 1) * 2) == 2 * 16 * 4
    assert saved_bytes(lambda: (x + 1) * 2) == 16 * 4


def batch_of(rows, length):
    ids = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def test_shapes_take_what_the_model_would(make_job, build):
    model = build(make_job(model=TinyModel(layers=3))).model
    real = saved_bytes(lambda: model(batch_of(4, 8)))
    with stand_ins(model, torch.device("cpu")):
        assert saved_bytes(lambda: model(batch_of(4, 8))) == real
        assert saved_bytes(lambda: model(batch_of(8, 8))) > 1.9 * real
    assert torch.isfinite(model(batch_of(4, 8))).all(), "its own parameters are back"


def test_tied_parameters_stay_tied():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    with stand_ins(model, torch.device("cpu"), torch.bfloat16):
        assert model["b"].weight is model["a"].weight
        assert model["a"].weight.dtype == torch.bfloat16
    assert model["b"].weight is model["a"].weight
    assert model["a"].weight.dtype == torch.float32


@pytest.mark.parametrize("fused", [True, False])
def test_optimizer_state_is_what_a_run_has_after_a_step(make_job, build, fused):
    run = build(make_job(optimizer=AdamW(fused=fused)))
    expected = optimizer_bytes(run.model, run.context)
    for item in run.parameters:
        item.parameter.grad = torch.zeros_like(item.parameter)
    run.optimizer.step()
    found = sum(value.nbytes for state in run.optimizer.state.values() for value in state.values())
    assert found == expected
    assert found // parameter_bytes(run.model) == 2


def test_frozen_parameters_have_no_gradients(make_job, build):
    model = build(make_job()).model
    before = gradient_bytes(model)
    model.head.weight.requires_grad_(False)
    assert before - gradient_bytes(model) == model.head.weight.nbytes
    assert parameter_bytes(model) == before


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("max", "5", 4096_000), ("1000000", "400000", 600_000), ("10", "50", 0)]
)
def test_memory_of_a_host_is_within_its_control_group(tmp_path, limit, used, expected):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert host_memory(tmp_path) == 4096_000
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(limit + "\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(used + "\n")
    assert host_memory(tmp_path) == expected


def test_ranks_of_a_host_share_its_memory(monkeypatch):
    whole = device_memory(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert device_memory(torch.device("cpu")) == pytest.approx(whole / 4, rel=0.2)
