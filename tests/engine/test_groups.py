"""`[[optimizer.groups]]`: other settings for some parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attrs import define, frozen

from forge_core import load_job
from forge_core.contracts.components import OptimizerComponent, ParameterGroup, SchedulerComponent, TrainingHook
from forge_core.contracts.errors import ForgeError
from forge_core.engine.build import build_context, build_run
from forge_core.engine.groups import apply_settings, check_groups
from forge_plugin_parallel import PipelineParallel
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import TINY_JOB, TinyAdamW, TinyModel, tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming, refuses

TABLES = (
    ParameterGroup(match="layers.0.*", lr=0.5),
    ParameterGroup(match="layers.*.up.*", lr=0.25, weight_decay=0.0, settings={"eps": 0.125}),
)


def settings_of(optimizer):
    return {name: group for group in optimizer.param_groups for name in group["names"]}


def test_a_parameter_has_the_settings_of_the_first_table_that_fits(make_job, build):
    found = settings_of(build(make_job(optimizer=TinyAdamW(lr=1e-2, groups=TABLES))).optimizer)
    seen = {name: (group["lr"], group["weight_decay"], group["eps"]) for name, group in found.items()}
    assert seen["layers.0.up.weight"] == (0.5, 0.1, 1e-5)
    assert seen["layers.1.up.weight"] == seen["layers.1.up.bias"] == (0.25, 0.0, 0.125)
    assert seen["layers.1.down.weight"] == (1e-2, 0.1, 1e-5)
    assert seen["embedding.weight"] == (1e-2, 0.0, 1e-5)


GROUPS = '[[optimizer.groups]]\nmatch = "layers.*"\nlr = 0.0\n'


def test_a_job_file_gives_them_and_the_update_obeys(tmp_path, monkeypatch, catalog, train):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(TINY_JOB + GROUPS)
    keep = Keep()
    train(load_job("job.toml"), keep)
    first, *_, last = keep.seen
    assert all(torch.equal(first[name], last[name]) == name.startswith("layers.") for name in first)


def test_factors_of_a_group_multiply_numbers_alone_that_have_one() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    group = {"params": [weight], "names": ["a"], "factors": {"lr": 0.25, "eps": 0.0}, "lr": 1.0, "eps": 1.0}
    optimizer = torch.optim.AdamW([group | {"amsgrad": False}])
    table = ParameterGroup(match="a", lr=0.5, settings={"amsgrad": True, "eps": 2.0})
    apply_settings(optimizer, [table], SimpleNamespace(sizes={}, names=lambda sizes: {"a": ("a",)}))
    [_, found] = optimizer.param_groups
    assert (found["lr"], found["eps"]) == (0.125, 0.0)
    # Not 1, as it would be multiplied by a factor of 1
    assert found["amsgrad"] is True


@define(kw_only=True, slots=False)
class Keep(TrainingHook):
    """Weights after each step, and the rates with which they were made."""

    def __attrs_post_init__(self):
        self.seen, self.rates = [], []  # no fields: those would be state

    def on_step_end(self, context):
        self.seen.append({name: p.detach().clone() for name, p in context.model.named_parameters()})
        self.rates.append([group["lr"] for group in context.optimizer.param_groups if group["params"]])


def test_the_schedule_multiplies_every_rate(make_job, train):
    keep = Keep()
    train(make_job(optimizer=TinyAdamW(lr=1.0, groups=TABLES), scheduler=Halving()), keep)
    assert keep.rates[0] == [1.0, 0.5, 0.25, 1.0, 0.5, 0.25]
    assert keep.rates[1] == [rate / 2 for rate in keep.rates[0]]


@frozen(kw_only=True)
class Halving(SchedulerComponent):
    def build(self, context):
        return lambda step, total: 0.5**step


@pytest.mark.parametrize(
    ("table", "path", "facts"),
    [
        (ParameterGroup(match="layer.*", lr=1.0), "optimizer.groups.0.match", ["'layer.*'"]),
        (
            ParameterGroup(match="head.*", settings={"momentum": 0.9}),
            "optimizer.groups.0.settings.momentum",
            ["betas", "lr"],
        ),
    ],
)
def test_what_cannot_be_is_refused(make_job, build, table, path, facts):
    with refuses(path, *facts):
        build(make_job(optimizer=TinyAdamW(groups=(table,))))


@frozen(kw_only=True)
class WarmAdamW(TinyAdamW):
    warmth: SchedulerComponent | None = None


def test_a_schedule_of_what_no_group_has_is_refused(make_job, build):
    with pytest.raises(ForgeError, match=naming("optimizer.warmth", "schedule", "key 'warmth'")):
        build(make_job(optimizer=WarmAdamW(warmth=Halving())))


def test_every_rank_of_a_pipeline_has_the_same_groups(tmp_path, catalog):
    tables = (ParameterGroup(match="embedding.*", lr=0.5), ParameterGroup(match="layers.3.*", lr=0.25))
    stages = {"pp": PipelineParallel(degree=2, schedule="gpipe")}
    optimizer = TinyAdamW(groups=tables)
    job = tiny_job(str(tmp_path), catalog, optimizer=optimizer, model=TinyModel(layers=4), parallel=stages)

    def rates(rank):
        return [group["lr"] for group in build_run(job, build_context(job, catalog, None)).optimizer.param_groups]

    first, last = run_on_ranks(2, rates)
    assert first == last == [1e-2, 0.5, 0.25, 1e-2, 0.5, 0.25]


TIED = Transformer(vocab_size=32, dim=16, layers=2, tie_embeddings=True, attention=GroupedQueryAttention(heads=2))


@pytest.mark.parametrize("match", ["head.*", "embedding.*"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tied_parameter_has_settings_by_any_of_its_names_on_every_rank(tmp_path, catalog, match, ranks):
    optimizer = TinyAdamW(groups=(ParameterGroup(match=match, lr=0.5),))
    stages = {"pp": PipelineParallel(degree=2, schedule="gpipe")} if ranks == 2 else {}
    job = tiny_job(str(tmp_path), catalog, optimizer=optimizer, model=TIED, parallel=stages)

    def rates(rank):
        found = settings_of(build_run(job, build_context(job, catalog, None)).optimizer)
        return {group["lr"] for name, group in found.items() if name in ("embedding.weight", "head.weight")}

    assert run_on_ranks(ranks, rates) == [{0.5}] * ranks


def test_a_parameter_in_no_group_or_in_two_is_refused():
    """torch's own optimizers refuse the latter themselves, but others may not."""
    once, twice, never = (SimpleNamespace(name=name, parameter=torch.zeros(1)) for name in ("once", "twice", "never"))
    groups = [{"params": [once.parameter, twice.parameter]}, {"params": [twice.parameter]}]
    with pytest.raises(ForgeError, match=naming("never", "groups")):
        check_groups(groups, [once, never])
    with pytest.raises(ForgeError, match=naming("twice", "more than one group")):
        check_groups(groups, [once, twice])
    check_groups(groups[:1], [once, twice])


def test_modes_without_weights_for_evaluation_are_refused(make_job, build):
    with pytest.raises(ForgeError, match=naming("HalfDone", "eval()", "evaluation_weights, load_evaluation_weights")):
        build(make_job(optimizer=HalfDoneComponent()))


class HalfDone(torch.optim.SGD):
    def eval(self):
        pass

    def train(self):
        pass


@frozen(kw_only=True)
class HalfDoneComponent(OptimizerComponent):
    def build(self, context, parameters):
        return HalfDone(parameters.groups(0.0), lr=0.1)
