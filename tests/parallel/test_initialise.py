"""Initialisation: seeded by (seed, name), complete, independent of how parameters are sharded."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from torch import nn

from forge_core.checkpoint.state import model_tensors
from forge_core.contracts.errors import ForgeError
from forge_core.parallel.initialise import BLOCK, SeededFill, materialise
from forge_kit.nn.modules import Linear
from forge_testing import TinyModel
from forge_testing.refusals import naming, refuses
from forge_testing.tiny import VOCABULARY
from forge_testing.tiny_model import TinyNetwork


def test_the_same_seed_and_name_give_the_same_values(make_job, build):
    first, second = (model_tensors(build(make_job()).model) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["layers.0.up.weight"], first["layers.1.up.weight"])


def test_another_seed_gives_other_values(make_job, build):
    first, second = (build(make_job(job={"seed": seed})).model for seed in (1, 2))
    assert not torch.equal(first.head.weight, second.head.weight)


def test_a_layer_more_leaves_the_others_as_they_are(make_job, build):
    small, large = (model_tensors(build(make_job(model=TinyModel(layers=n))).model) for n in (2, 3))
    assert all(torch.equal(small[name], large[name]) for name in small)


@pytest.mark.parametrize("shape", [(1000, 3000), (7, 5, 4), (9,), ()])
def test_values_have_the_distribution_that_was_asked_for(shape):
    parameter = torch.full(shape, torch.nan)
    SeededFill(parameter, "w", 1).normal(0.5)
    assert torch.isfinite(parameter).all()
    if parameter.numel() > 10**6:
        assert parameter.std().item() == pytest.approx(0.5, rel=0.01)
        assert parameter.mean().item() == pytest.approx(0, abs=0.01)
        rows = BLOCK // 3000
        assert not torch.equal(parameter[:rows], parameter[rows : 2 * rows]), "blocks differ"


def test_truncated_values_stay_within_their_bound():
    parameter = torch.empty(2000, 100)
    SeededFill(parameter, "w", 1).trunc_normal(0.1, bound=2)
    assert 0.19 < parameter.abs().max() <= 0.2


class Placed(nn.Module):
    """Says where its buffer is to be initialised."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2))
        self.register_buffer("table", torch.empty(3), persistent=False)

    def init_parameter(self, name, fill):
        fill.constant(1.0)

    def init_buffers(self, device):
        self.seen = device


@pytest.mark.parametrize(
    ("dtype", "trained", "needed"), [("float32", True, 8), ("bfloat16", True, 6), ("float32", False, 4)]
)
def test_weights_and_gradients_that_do_not_fit_are_refused(tmp_path, monkeypatch, dtype, trained, needed):
    """A gradient of bfloat16 is summed in float32."""

    def module() -> Linear:
        with torch.device("meta"):
            return Linear(1 << 18, 4, std=0.02).to(getattr(torch, dtype)).requires_grad_(trained)

    count = sum(parameter.numel() for parameter in module().parameters())
    monkeypatch.setattr("forge_core.parallel.initialise.MEMINFO", meminfo := tmp_path / "meminfo")
    meminfo.write_text(f"MemAvailable: {count * needed // 1024 + 1} kB\n")
    materialise(module(), torch.device("cpu"), seed=0)
    meminfo.write_text(f"MemAvailable: {count * needed // 1024 - 1} kB\n")
    with refuses("model", f"{count:,}", "forge-run plan"):
        materialise(module(), torch.device("cpu"), seed=0)


def test_parameters_may_live_elsewhere_than_buffers():
    with torch.device("meta"):
        module = Placed()
    materialise(module, torch.device("meta"), seed=0, home=torch.device("cpu"))
    assert torch.equal(module.weight, torch.ones(2, 2))
    assert (module.table.device.type, module.seen.type) == ("meta", "meta")


def test_values_are_those_of_where_they_are_drawn():
    drawn = SeededFill(torch.empty(4, 4), "w", 1, torch.device("meta"))
    with pytest.raises(RuntimeError, match="META"):
        drawn.normal(1.0)


@frozen(kw_only=True)
class Custom(TinyModel):
    """The tiny model with a module of the test's."""

    def build(self, context):
        model = super().build(context)
        model.extra = self.extra()
        return model

    def extra(self):
        raise NotImplementedError


class Forgets(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


def test_a_module_that_cannot_initialise_itself_is_named(make_job, build):
    @frozen(kw_only=True)
    class Model(Custom):
        def extra(self):
            return Forgets()

    with pytest.raises(ForgeError, match=naming("Forgets (extra)", "weight", "init_parameter")):
        build(make_job(model=Model()))


def test_a_parameter_that_stays_nan_is_found(make_job, build):
    class HalfDone(Linear):
        def init_parameter(self, name, fill):
            pass

    @frozen(kw_only=True)
    class Model(Custom):
        def extra(self):
            return HalfDone(2, 2)

    with pytest.raises(ForgeError, match=naming("extra.weight", "finite")):
        build(make_job(model=Model()))


class HalfReset(nn.Linear):
    """Has a parameter that its `reset_parameters` leaves as it is."""

    def __init__(self):
        super().__init__(4, 4)
        self.gain = nn.Parameter(torch.ones(()))


def test_a_parameter_that_reset_parameters_leaves_out_is_found(make_job, build):
    @frozen(kw_only=True)
    class Model(Custom):
        def extra(self):
            return HalfReset()

    with pytest.raises(ForgeError, match=naming("extra.gain", "finite")):
        build(make_job(model=Model()))


class Rotary(nn.Module):
    """Computes a table in its constructor, on the meta device, and not again; its mask has infinite values."""

    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("table", torch.ones(4, dtype=dtype))
        self.register_buffer("mask", torch.zeros(4))

    def reset_parameters(self):
        self.mask.fill_(float("-inf"))
        self.mask[0] = float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_buffer_that_is_made_with_its_module_alone_is_found(make_job, build, dtype):
    @frozen(kw_only=True)
    class Model(Custom):
        def extra(self):
            return Rotary(dtype)

    with pytest.raises(ForgeError, match=naming("buffer extra.table", "init_buffers", "reset_parameters")):
        build(make_job(model=Model()))


class InitialisesNoBuffer(Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("table", torch.ones(4))


def test_a_buffer_that_init_buffers_leaves_out_is_found(make_job, build):
    @frozen(kw_only=True)
    class Model(Custom):
        def extra(self):
            return InitialisesNoBuffer()

    with pytest.raises(ForgeError, match=naming("buffer extra.table", "init_buffers")):
        build(make_job(model=Model()))


def test_modules_of_torch_initialise_as_they_are_seeded(make_job, build):
    @frozen(kw_only=True)
    class Model(Custom):
        def extra(self):
            return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(4))

    first, second = (build(make_job(model=Model())).model.extra for _ in range(2))
    assert torch.equal(first[0].weight, second[0].weight)
    assert first[0].weight.abs().max().item() == pytest.approx(1 / 8, rel=0.01)
    assert torch.equal(first[1].running_var, torch.ones(4))


class TiedNetwork(TinyNetwork):
    """Says that its head is its embedding, and leaves it at that: nothing here puts them together again."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.head.weight = self.embedding.weight

    def tied_parameters(self):
        return {"head.weight": "embedding.weight"}


@frozen(kw_only=True)
class Tied(TinyModel):
    def build(self, context):
        return TiedNetwork(self.dim, self.layers, self.dropout, VOCABULARY, context.dtype)


def test_tied_parameters_stay_one_through_the_allocation_of_memory(make_job, build, train):
    run = build(make_job(model=Tied()))
    assert run.model.head.weight is run.model.embedding.weight
    assert [item.name for item in run.parameters].count("head.weight") == 0
