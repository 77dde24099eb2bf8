"""A new run with fresh adapters begins with the loss of its base, or ends before the first step."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from forge_core import Job, ModelComponent, Plugin, Trainer, hookimpl
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ForgeError
from forge_core.plugins.catalog import Catalog
from forge_plugin_checkpoints import Parts
from forge_plugin_lora import LoRA, hooks
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.catalogs import installed, with_components
from forge_testing.layouts import LAYOUTS
from forge_testing.outcomes import Stop, losses_of
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming

MODEL = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2))

FRESH = LoRA(rank=2)


@define(kw_only=True, slots=False)
class FilledB(Plugin):
    """Fills B of each adapter as A is filled, by the mistake of a user."""

    resumes_as = "safe"

    @hookimpl(wrapper=True)
    def forge_build_model(self, component: ModelComponent, context: Any) -> Generator[None, Any, Any]:
        model = yield
        for name, module in model.named_modules():
            if name.endswith("lora_b"):
                module.std = 0.5
        return model


@define(kw_only=True, slots=False)
class Dropout(Plugin):
    """Dropout after each adapted matrix, in training."""

    resumes_as = "safe"

    @hookimpl(wrapper=True)
    def forge_build_model(self, component: ModelComponent, context: Any) -> Generator[None, Any, Any]:
        from torch.nn.functional import dropout

        model = yield
        for module in model.modules():
            if hasattr(module, "lora_b"):
                module.register_forward_hook(lambda module, _, y: dropout(y, 0.5, module.training))
        return model


class IgnoredLabels(TrainingHook):
    """Ignores the labels of the first micro-batch."""

    resumes_as = "safe"

    def on_step_begin(self, context: Any) -> None:
        context.batches[0]["labels"].fill_(-100)


@define(kw_only=True, slots=False)
class NoLabels(Plugin):
    """Adds that hook before the plugin's."""

    resumes_as = "safe"

    @hookimpl
    def forge_training_hooks(self, job: Job) -> list[TrainingHook]:
        return [IgnoredLabels()]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return with_components(installed(), {"plugin": {"filled": FilledB, "dropout": Dropout, "no_labels": NoLabels}})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has trained a model."""
    job = tiny_job(str(tmp_path_factory.mktemp("base")), installed(), model=MODEL, steps=4, precision="fp64")
    return Trainer(job, catalog=installed(), echo=lambda line: None).run().folder


@pytest.fixture
def job(base: Path, tmp_path: Path, catalog: Catalog) -> Callable[..., Job]:
    """Jobs that train adapters beside that model's matrices, with these further plugins."""

    def make(name: str, lora: LoRA | None = FRESH, further: Any = None, **changes: Any) -> Job:
        settings: dict[str, Any] = {
            "model": MODEL,
            "steps": 3,
            "precision": "fp64",
            "global_batch_size": 8,
            "seq_len": 16,
            "job": {"name": name, "output": str(tmp_path)},
            "data": {"sources": (Numbers(start=7, ignored=3),)},
            "checkpoint": {"load": Parts(path=str(base))},
            # Wrappers of the plugins in front are outside: they have the model with its adapters
            "plugins": {**(further or {}), **({"adapters": lora} if lora else {})},
        }
        return tiny_job(str(tmp_path), catalog, **{**settings, **changes})

    return make


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """The losses that were compared, with adapters and without."""
    seen: list[tuple[float, float]] = []
    compare = hooks._compare

    def record(with_adapters: float, without: float, job: Job) -> None:
        seen.append((with_adapters, without))
        compare(with_adapters, without, job)

    monkeypatch.setattr(hooks, "_compare", record)
    return seen


def plain_loss(job: Any, train: Any) -> float:
    """The first loss of a job that trains the base as it is."""
    return losses_of(train(job("plain", lora=None, steps=1)))[0]


def losses_in(error: BaseException) -> list[float]:
    """The losses that the error names: with adapters, and without."""
    found = re.search(r"the loss is (\S+) with adapters and (\S+) without", str(error))
    assert found, error
    return [float(number) for number in found.groups()]


@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
def test_the_first_loss_is_the_base_s_and_is_compared_once(job, train, compared, method):
    lora = LoRA(rank=2, method=method)
    summary = train(job("run", lora), Stop(step=2))
    expected = plain_loss(job, train)
    [(with_adapters, without)] = compared
    assert with_adapters == pytest.approx(without, rel=1e-14)
    assert without == pytest.approx(expected, rel=1e-12)
    assert losses_of(summary)[0] == pytest.approx(without, rel=1e-12)
    train(job("run", lora))  # continues
    assert len(compared) == 1


def test_adapters_that_change_the_base_end_the_run_before_its_first_step(job, train, base):
    fault = {"fault": FilledB()}
    with pytest.raises(ForgeError, match=naming("[plugins.adapters]", "plugins.adapters.check_first_loss")) as error:
        train(job("faulty", further=fault))
    with_adapters, without = losses_in(error.value)
    unchecked = train(job("unchecked", LoRA(rank=2, check_first_loss=False), fault))
    assert without == pytest.approx(plain_loss(job, train), rel=1e-5)
    assert with_adapters == pytest.approx(losses_of(unchecked)[0], rel=1e-5)
    assert abs(with_adapters - without) > 0.01


def test_dropout_is_no_fault(job, train, compared):
    summary = train(job("noisy", further={"dropout": Dropout()}))
    [(with_adapters, without)] = compared
    assert with_adapters == without
    assert losses_of(summary)[0] != pytest.approx(without, rel=1e-3)


def test_adapters_that_come_from_a_checkpoint_may_change_the_base(job, train, compared):
    trained = train(job("trained")).folder
    further = train(job("further", checkpoint={"load": Parts(path=str(trained))}, steps=1))
    afresh = Parts(path=str(trained), exclude=("*lora_*",))
    fresh = train(job("fresh", checkpoint={"load": afresh}, steps=1))
    assert losses_of(further)[0] != pytest.approx(losses_of(fresh)[0], rel=1e-6)
    assert len(compared) == 2  # of the runs whose adapters are fresh


def test_a_random_base_is_not_compared(job, train, compared):
    train(job("random", LoRA(rank=2, random_base=True), checkpoint={"load": ()}))
    assert not compared


def test_a_micro_batch_without_labels_leaves_the_comparison_to_the_next(job, train):
    both = []
    for further in ({}, {"no_labels": NoLabels()}):
        with pytest.raises(ForgeError) as error:
            train(job("faulty", further={**further, "fault": FilledB()}, micro_batch_size=4))
        both.append(losses_in(error.value))
    assert both[0] != both[1]
    assert 0 not in both[1]


ROWS = {"fsdp2": 4, "tp2": 8, "pp2": 4, "cp2": 8, "compiled": 8}
"""Sequences of a micro-batch of a rank, by layout."""


def test_layouts_compare_the_same_losses(job, train, catalog, tmp_path):
    """With the fault: all ranks end, by the losses of one process. Without it, none."""
    expected = {}
    for rows in (4, 8):
        with pytest.raises(ForgeError) as error:
            train(job(f"alone{rows}", further={"fault": FilledB()}, micro_batch_size=rows))
        expected[rows] = losses_in(error.value)

    def on_ranks(names: list[str]) -> Callable[[int], dict[str, list[float]]]:
        def observe(rank: int) -> dict[str, list[float]]:
            seen = {}
            for name in names:
                stages = LAYOUTS[name].stages(catalog)
                settings: dict[str, Any] = {"parallel": stages, "micro_batch_size": ROWS[name], "steps": 1}
                with pytest.raises(ForgeError) as error:
                    quietly(job(f"{name}_faulty", further={"fault": FilledB()}, **settings))
                seen[name] = losses_in(error.value)
                quietly(job(name, **settings))
            return seen

        return observe

    def quietly(job: Job) -> None:
        Trainer(job, catalog=catalog, echo=lambda line: None).run()

    ranks = run_on_ranks(2, on_ranks(["fsdp2", "tp2", "pp2", "cp2"]))
    for seen in (*ranks, on_ranks(["compiled"])(0)):
        for name, losses in seen.items():
            # Together, two ranks of `fsdp` have the rows of the whole batch
            rows = 8 if name == "fsdp2" else ROWS[name]
            assert losses == pytest.approx(expected[rows], rel=1e-5), name
