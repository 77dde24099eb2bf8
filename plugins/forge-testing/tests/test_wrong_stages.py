"""What the suite of stages says of wrong ones."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from attrs import frozen
from torch import nn

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.runtime import ParallelStage
from forge_testing.refusals import lacks
from forge_testing.suites import StageSuite

pytestmark = pytest.mark.thorough


def component_of(transform, stage=None):
    """`transform(model)` is what it applies."""
    stage = stage or Stage

    @frozen(kw_only=True)
    class Wrong(ParallelComponent):
        def build(self, context):
            return stage(transform)

    return Wrong()


class Stage(ParallelStage):
    def __init__(self, transform):
        self._transform = transform

    def apply(self, model):
        return self._transform(model)


class Misspelt(Stage):
    def complete_gradient(self, model):
        """Nobody calls it."""


class Talkative(Stage):
    """Says what it did as a list."""

    def describe(self):
        return ["nothing"]


def renaming(model):
    model.norm = nn.Sequential(model.norm)
    return model


def dropping(model):
    del model.layers["1"]
    return model


def doubling(model):
    forward = model.layers["0"].forward
    model.layers["0"].forward = lambda carry, batch: (2 * forward(carry, batch)[0],)
    return model


def of_the_rank(model):
    """Each rank computes another model."""
    forward, factor = model.layers["0"].forward, 1 + torch.distributed.get_rank()
    model.layers["0"].forward = lambda carry, batch: (factor * forward(carry, batch)[0],)
    return model


@frozen(kw_only=True)
class Unreasoned(ParallelComponent):
    after: ClassVar = {"tp": ""}


@frozen(kw_only=True)
class OfAnotherMesh(ParallelComponent):
    def degrees(self):
        return {"experts": 2}


@frozen(kw_only=True)
class OfNoSize(ParallelComponent):
    def degrees(self):
        return {"tp": 0}


NAMES, SAME = "test_it_keeps_the_names_of_parameters", "test_a_run_comes_to_the_same_as_without_it"


@pytest.mark.parametrize(
    ("check", "component", "told"),
    [
        (
            NAMES,
            component_of(renaming),
            "rank 0 has parameters that the bare model has not: norm.0.bias, norm.0.weight",
        ),
        (NAMES, component_of(dropping), "no rank has layers.1.pair.down.weight, layers.1.pair.up.bias, "),
        (NAMES, component_of(lambda model: None), "apply returned a NoneType; return the model"),
        (
            NAMES,
            component_of(lambda model: model, Talkative),
            "describe() returns a list; it is a text for the summary",
        ),
        (
            NAMES,
            component_of(lambda model: model, Misspelt),
            "'complete_gradient', which forge_core.contracts",
        ),
        (SAME, component_of(renaming), "it fails on 1 rank: AssertionError: rank 0: Traceback"),
        (SAME, component_of(doubling), "a run with it differs from one without by Difference(initial=0.0, loss="),
    ],
)
def test_what_is_wrong_is_told(refusal, check, component, told):
    assert told in refusal(StageSuite, check, component)


@pytest.mark.parametrize(
    ("check", "component", "told"),
    [
        ("test_its_relations_have_reasons", Unreasoned(), "after['tp'] has no reason; the summary prints it"),
        (
            "test_its_degrees_are_of_the_mesh",
            OfAnotherMesh(),
            "degrees has 'experts'; the mesh has pp, replicate, shard",
        ),
        (
            "test_its_degrees_are_of_the_mesh",
            OfNoSize(),
            'degrees has the size 0 for tp; it is a number from 1, or "auto"',
        ),
    ],
)
def test_what_it_declares_wrongly_is_told(component, check, told):
    test = type("TestWrong", (StageSuite,), {"component": component})()
    with pytest.raises(AssertionError) as caught:
        getattr(test, check)()
    assert told in str(caught.value)


def test_ranks_that_do_not_sum_are_told(refusal):
    said = refusal(StageSuite, SAME, component_of(of_the_rank), ranks=2)
    assert not lacks(said, "1e-09", "1e-07", "summed")
