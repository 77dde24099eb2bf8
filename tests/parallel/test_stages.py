"""Stages: order from their relations, and what they must not do to a model."""

from __future__ import annotations

from typing import ClassVar

import pytest
from attrs import frozen

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.errors import ForgeError
from forge_core.contracts.runtime import ParallelStage
from forge_core.engine.trainer import Trainer
from forge_core.parallel.stages import order_stages
from forge_core.plugins.catalog import Catalog
from forge_testing import tiny_job
from forge_testing.catalogs import with_components
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming, refuses


@frozen(kw_only=True)
class Stage(ParallelComponent):
    def build(self, context):
        component = self

        class Built(ParallelStage):
            def apply(self, model):
                return component.transform(model)

        return Built()

    def transform(self, model):
        return model


@frozen(kw_only=True)
class Sharding(Stage):
    after: ClassVar = {"compiling": "blocks are compiled before they are sharded"}


@frozen(kw_only=True)
class Compiling(Stage):
    pass


@frozen(kw_only=True)
class Swapping(Stage):
    before: ClassVar = {"compiling": "it swaps the modules", "sharding": "it swaps the modules"}


@frozen(kw_only=True)
class Contrary(Stage):
    after: ClassVar = {"sharding": "because"}
    before: ClassVar = {"swapping": "why not"}


STAGES = {"sharding": Sharding, "compiling": Compiling, "swapping": Swapping, "contrary": Contrary}


@pytest.fixture
def stages() -> Catalog:
    return with_components(Catalog.installed(), {"parallel": STAGES})


def chosen(catalog, *names):
    return {name: catalog.load("parallel", name)() for name in names}


@pytest.mark.parametrize("names", [("sharding", "compiling", "swapping"), ("compiling", "swapping", "sharding")])
def test_the_order_follows_from_the_relations_whatever_the_file_says(stages, names):
    ordered = order_stages(chosen(stages, *names), stages)
    assert [stage.name for stage in ordered] == ["swapping", "compiling", "sharding"]
    assert set(ordered[2].reasons) == {
        "after compiling: blocks are compiled before they are sharded",
        "after swapping: it swaps the modules",
    }


def test_without_a_relation_the_order_of_the_file_holds(stages):
    assert [s.name for s in order_stages({"b": Stage(), "a": Stage()}, stages)] == ["b", "a"]


def test_a_contradiction_is_named_with_its_reasons(stages):
    names = ("swapping", "sharding", "contrary")
    with refuses("parallel", "contrary after sharding (because)"):
        order_stages(chosen(stages, *names), stages)


@frozen(kw_only=True)
class Renames(Stage):
    def transform(self, model):
        model.layers["9"] = model.layers.pop("1")
        return model


def test_a_stage_must_not_rename_parameters(make_job, build):
    with pytest.raises(ForgeError, match=naming("parallel.r", "names", "layers.1.down.weight")):
        build(make_job(parallel={"r": Renames()}))


@frozen(kw_only=True)
class Hooks(Stage):
    def transform(self, model):
        model.layers["0"].register_forward_hook(lambda *args: None)
        return model


@frozen(kw_only=True)
class Drops(Stage):
    def transform(self, model):
        model.layers["0"]._forward_hooks.clear()
        return model


def test_a_stage_must_not_lose_what_an_earlier_one_put_on(make_job, build):
    with pytest.raises(ForgeError, match=naming("parallel.d", "earlier stages", "layers.0")):
        build(make_job(parallel={"h": Hooks(), "d": Drops()}))


class Misspelt(ParallelStage):
    def complete_gradient(self, model):
        """Would sum the gradients, if anyone called it."""


class Unknown(ParallelStage):
    ranks = 2


class Stranger:
    def apply(self, model):
        return model


@frozen(kw_only=True)
class Building(ParallelComponent):
    """Owns the reduction of gradients, as its stage says."""

    owns_reduction: ClassVar[bool] = True
    cls: type

    def degrees(self):
        return {"replicate": "auto"}

    def build(self, context):
        return self.cls()


@pytest.mark.parametrize(
    ("cls", "facts"),
    [
        (Misspelt, ["Misspelt", "'complete_gradient'", "ParallelStage", "'complete_gradients'"]),
        (Unknown, ["Unknown", "'ranks'", "underscore"]),
        (Stranger, ["Stranger", "runtime.ParallelStage"]),
    ],
)
def test_a_run_refuses_a_stage_that_breaks_its_contract(tmp_path, cls, facts):
    def train(rank):
        with pytest.raises(ForgeError, match=naming("parallel.mine", *facts)):
            Trainer(tiny_job(str(tmp_path), parallel={"mine": Building(cls=cls)}), echo=lambda text: None).run()
        return True

    assert run_on_ranks(2, train) == [True, True]


def test_a_stage_that_brings_an_executor_replaces_the_plain_one(make_job, build):
    from forge_core.engine.executor import PlainExecutor

    class Mine(PlainExecutor):
        pass

    @frozen(kw_only=True)
    class Pipeline(Stage):
        def build(self, context):
            class Built(ParallelStage):
                def executor(self, model, loss, stages):
                    return Mine(model, loss)

            return Built()

    assert isinstance(build(make_job(parallel={"p": Pipeline()})).executor, Mine)
