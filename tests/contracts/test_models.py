"""Models override methods of a base class with defaults: none is missed in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import frozen
from torch import nn

from forge_core.contracts.components import OptimizerComponent, ParallelComponent
from forge_core.contracts.errors import ForgeError, Problem
from forge_core.contracts.model import Model, with_defaults
from forge_core.contracts.optimizer import NamedParameters, roles_of
from forge_core.contracts.runtime import ParallelStage
from forge_plugin_adamw import AdamW
from forge_plugin_muon import Muon
from forge_testing import TinyModel, tiny_job
from forge_testing.refusals import at, check_problems, naming, problems_of
from forge_testing.tiny_model import TinyNetwork


@frozen(kw_only=True)
class Of(TinyModel):
    """A model of a class that the test names."""

    cls: str = "TinyNetwork"

    def build(self, context):
        return globals()[self.cls](self.dim, self.layers, self.dropout, 32, context.dtype)


@frozen(kw_only=True)
class Looking(ParallelComponent):
    """A stage that looks at the model when a job is checked."""

    def model_problems(self, model, layout):
        return ()

    def build(self, context):
        return ParallelStage()


class Plain(nn.Linear):
    """A module that is no model."""

    def __init__(self, *args):
        super().__init__(2, 2)


class Misspelt(TinyNetwork):
    def tensor_paralel_plan(self):
        return {}


class Beside(TinyNetwork):
    """Has a method of its own beside the one that it resembles."""

    def tensor_parallel_plan(self):
        return self.tensor_parallel_plans()[0]

    def tensor_parallel_plans(self):
        return [{}]


class Filtering(TinyNetwork):
    def parameter_roles(self):
        return {"layers.0.up.weight": "filter"}


class Norming(TinyNetwork):
    def parameter_roles(self):
        return {"norm.weight": "nrom"}


@frozen(kw_only=True)
class FilterMuon(Muon):
    """An optimizer of a third party, which knows a role of its own."""

    further_roles = ("filter",)


def problems(tmp_path: Any, cls: type, optimizer: OptimizerComponent | None = None) -> list[Problem]:
    changes = {"optimizer": optimizer} if optimizer else {}
    return problems_of(
        tiny_job(str(tmp_path), model=Of(cls=cls.__name__), parallel={"looking": Looking()}, **changes), 1
    )


def test_a_method_that_is_misspelt_is_refused(tmp_path):
    facts = ("Misspelt", "'tensor_paralel_plan'", "forge_core.contracts.model.Model", "'tensor_parallel_plan'")
    check_problems(problems(tmp_path, Misspelt), at("model", *facts))


def test_a_method_beside_the_one_that_it_resembles_is_not_refused(tmp_path):
    assert problems(tmp_path, Beside) == []


def test_a_model_without_the_base_class_is_refused(tmp_path):
    check_problems(problems(tmp_path, Plain), at("model", "Plain", "forge_core.contracts.model.Model"))


def test_defaults_stand_behind_all_that_a_module_has_or_passes_on():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = TinyNetwork(4, 2, 0.0, 8, torch.float32)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def float8_exempt(self):
            return ["head"]

    model = with_defaults(Wrapper())
    assert model.ends() == (["embedding"], ["norm", "head"])
    assert model.float8_exempt() == ["head"]
    assert with_defaults(nn.Linear(2, 2)).further_blocks() == ()


def test_defaults_are_given_to_a_module_once():
    model = with_defaults(nn.Linear(2, 2))
    cls = type(model)
    assert type(with_defaults(model)) is cls


def test_a_model_may_have_a_role_of_its_own():
    model = Filtering(4, 1, 0.0, 8, torch.float32)
    assert [item.name for item in NamedParameters.of(model) if item.role == "filter"] == ["layers.0.up.weight"]
    assert roles_of(model)["layers.0.down.weight"] == "matrix"


def test_a_misspelt_role_is_refused():
    with pytest.raises(ForgeError, match=naming("role 'nrom'", "'norm'")):
        roles_of(Norming(4, 1, 0.0, 8, torch.float32))


def test_an_optimizer_that_treats_roles_apart_refuses_one_that_it_does_not_know(tmp_path):
    check_problems(problems(tmp_path, Filtering, Muon()), at("optimizer", "role 'filter'", "layers.0.up.weight"))
    assert problems(tmp_path, TinyNetwork, Muon()) == []
    assert problems(tmp_path, Filtering, FilterMuon()) == []
    assert problems(tmp_path, Filtering, AdamW()) == []


def test_every_method_of_the_base_but_the_parts_has_a_default():
    model = Model()
    model.layers = nn.ModuleDict()
    assert model.prepare({}) == model.prepare_sequences({}) == {}
    assert model.flops(8) is model.layer_flops(8) is model.ends() is model.sequence_entries() is None
    assert model.embed_flops(8) == 0.0
    declared = (model.parameter_roles(), model.tied_parameters(), model.tensor_parallel_plan(), model.sequence_mixers())
    assert not any((*declared, model.expert_stacks(), model.further_blocks(), model.fsdp_units()))
    assert not any((model.float8_exempt(), model.backend_choices(8)))
