"""Resuming with another job than the one that saved: what goes on at once, what must be asked for, what cannot be."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import tomli_w
from attrs import define, field, frozen

from forge_core.checkpoint.run_diff import job_changes, text_changes
from forge_core.cli import main
from forge_core.config.field_types import is_section
from forge_core.config.keys import key_fields
from forge_core.config.load import dump_job, load_job
from forge_core.contracts.components import (
    Component,
    ModelComponent,
    OptimizerComponent,
    ParameterGroup,
    Plugin,
    TrainingHook,
    when_resumed,
)
from forge_core.contracts.errors import CheckpointError, ResumeError
from forge_core.contracts.hookspecs import hookimpl
from forge_core.job import Job, Phase
from forge_core.plugins.catalog import Catalog
from forge_testing import TINY_JOB, Numbers, TinyAdamW, TinyModel
from forge_testing.catalogs import with_components
from forge_testing.refusals import lacks, naming


@define(kw_only=True, slots=False)
class Counter(TrainingHook):
    """Counts steps."""

    by: int = 1
    seen: int = field(init=False, default=0)

    def on_step_end(self, context):
        self.seen += self.by
        context.log("seen", float(self.seen))


@define(kw_only=True, slots=False)
class Other(TrainingHook):
    """Has state under the same name as `Counter`, which means something else."""

    seen: str = field(init=False, default="nothing")


@define(kw_only=True, slots=False)
class Watcher(TrainingHook):
    """Only looks on."""

    resumes_as = "safe"
    every: int = 1


@define(kw_only=True, slots=False)
class Average(Plugin):
    """A plugin with state."""

    decay: float = 0.9
    seen: int = field(init=False, default=0)


@frozen(kw_only=True)
class Sgd(OptimizerComponent):
    lr: float = 0.1

    def build(self, context, parameters):
        import torch

        return torch.optim.SGD(parameters.groups(0.0), lr=self.lr)


@frozen(kw_only=True)
class Tiring(OptimizerComponent):
    """SGD whose groups slow down by what they count."""

    lr: float = 0.1

    def build(self, context, parameters):
        import torch

        class TiringSGD(torch.optim.SGD):
            group_state = ("walked",)

            def step(self, closure=None):
                for group in self.param_groups:
                    group["walked"] = group.get("walked", 0.0) + group["lr"]
                    group["lr"] /= 1 + 9 * group["walked"]
                super().step(closure)

        return TiringSGD(parameters.groups(0.0), lr=self.lr)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def resume(make_job, train, said):
    """Two steps of one job, then two more of another that differs from it."""

    def run(before: Mapping[str, Any], after: Mapping[str, Any], **options: Any):
        train(make_job(**{"steps": 2} | before))
        return train(make_job(**{"steps": 4} | after), echo=said.append, **options)

    return run


def means(before: Job, after: Job, catalog) -> dict[str, str]:
    return {change.path: change.means for change in job_changes(dump_job(before, catalog), after, catalog)}


# --- what a change means -----------------------------------------------------------------------------------------


SAFE = {
    "job.output": {"job": {"output": "elsewhere"}},
    "train.steps": {"steps": 9},
    "train.micro_batch_size": {"micro_batch_size": 1},
    "train.deterministic": {"deterministic": True},
    "data.workers": {"data": {"workers": 2}},
    "checkpoint.interval": {"checkpoint": {"interval": 1}},
    "eval.at_start": {"eval": {"at_start": True}},
    "hooks.watcher.type": {"hooks": {"watcher": Watcher()}},
}
NEED_THE_FLAG = {
    "job.seed": {"job": {"seed": 1}},
    "train.global_batch_size": {"global_batch_size": 8},
    "train.seq_len": {"seq_len": 4},
    "train.precision": {"precision": "bf16"},
    "train.grad_clip_norm": {"grad_clip_norm": 0.5},
    "data.seed": {"data": {"seed": 3}},
    "data.sources.0.weight": {"data": {"sources": (Numbers(weight=2.0),)}},
    "data.sources.1.type": {"data": {"sources": (Numbers(), Numbers(start=9))}},
    "optimizer.lr": {"optimizer": TinyAdamW(lr=1e-3)},
    "model.dropout": {"model": TinyModel(dropout=0.1)},
    "hooks.counter.type": {"hooks": {"counter": Counter()}},
    "plugins.average.type": {"plugins": {"average": Average()}},
}
IMPOSSIBLE = {
    "model.dim": {"model": TinyModel(dim=24)},
    "model.layers": {"model": TinyModel(layers=3)},
    "optimizer.type": {"optimizer": Sgd()},
}


@pytest.mark.parametrize("means_", ["safe", "flag", "impossible"])
def test_a_change_means_what_its_section_kind_or_field_says(make_job, catalog, means_):
    cases = {"safe": SAFE, "flag": NEED_THE_FLAG, "impossible": IMPOSSIBLE}[means_]
    found = {path: means(make_job(), make_job(**changes), catalog) for path, changes in cases.items()}
    assert found == {path: {path: means_} for path in cases}


def test_what_goes_means_the_same_as_what_comes(make_job, catalog):
    known = with_components(catalog, {"hook": {"watcher": Watcher, "counter": Counter}, "plugin": {"average": Average}})
    for path, changes in {**SAFE, **NEED_THE_FLAG, **IMPOSSIBLE}.items():
        there = means(make_job(), make_job(**changes), known)
        assert means(make_job(**changes), make_job(), known) == there, path


def test_the_same_job_has_not_changed(make_job, catalog):
    job = make_job(hooks={"counter": Counter()}, data={"sources": (Numbers(name="a"), Numbers(name="b"))})
    assert job_changes(dump_job(job, catalog), job, catalog) == []


def test_every_section_of_the_core_says_what_its_changes_mean():
    sections = [key for key, f in key_fields(attrs.resolve_types(Job)).items() if is_section(f.type)]
    assert {"train", "data"} <= set(sections)
    fields = attrs.fields_dict(Job)
    assert [key for key in sections if "when_resumed" not in fields[key].metadata] == []


@pytest.mark.parametrize(
    ("section", "safe"),
    [
        ("job", {"name", "output"}),
        (
            "train",
            {
                "steps",
                "stop_after",
                "micro_batch_size",
                "device",
                "float32_matmul",
                "non_finite",
                "non_finite_limit",
                "dry_run",
                "deterministic",
                "gc_interval",
            },
        ),
        ("data", {"workers"}),
    ],
)
def test_keys_whose_change_makes_no_other_run_are_these(section: str, safe: set[str]) -> None:
    cls = attrs.fields_dict(attrs.resolve_types(Job))[section].type
    words = {key: f.metadata.get("when_resumed", "flag") for key, f in key_fields(cls).items()}
    assert {key for key, word in words.items() if word == "safe"} == safe
    assert set(words.values()) == {"safe", "flag"}


@frozen(kw_only=True)
class Part(Component):
    kind = "part"
    size: int = 1
    kernel: str = field(default="auto", metadata=when_resumed("safe"))


@frozen(kw_only=True)
class Position(Component):
    kind = "position"
    resumes_as = "flag"
    theta: float = 1.0


@frozen(kw_only=True)
class Whole(ModelComponent):
    part: Part = Part()
    position: Position = Position()
    kept: Part = field(default=Part(), metadata=when_resumed("flag"))


@pytest.mark.parametrize(
    ("change", "path", "meaning"),
    [
        ({"part": Part(size=2)}, "model.part.size", "impossible"),
        ({"part": Part(kernel="fast")}, "model.part.kernel", "safe"),
        ({"position": Position(theta=2.0)}, "model.position.theta", "flag"),
        ({"kept": Part(size=2)}, "model.kept.size", "flag"),
        ({"kept": Part(kernel="fast")}, "model.kept.kernel", "safe"),
    ],
)
def test_the_word_that_is_closest_to_the_key_counts(make_job, catalog, change, path, meaning):
    assert means(make_job(model=Whole()), make_job(model=Whole(**change)), catalog) == {path: meaning}


def test_phases_and_plain_tables_are_compared_key_by_key(make_job, catalog):
    sources = (Numbers(name="a"), Numbers(name="b"))
    phase = Phase(start_step=2, weights={"a": 2.0})
    none, one, other = (
        make_job(data={"sources": sources, "phases": phases})
        for phases in ((), (phase,), (attrs.evolve(phase, weights={"a": 3.0, "b": 0.0}),))
    )
    assert means(none, one, catalog) == {"data.phases.0.start_step": "flag", "data.phases.0.weights.a": "flag"}
    assert means(one, other, catalog) == {"data.phases.0.weights.a": "flag", "data.phases.0.weights.b": "flag"}


def test_sources_are_compared_by_name(make_job, catalog):
    before = make_job(data={"sources": (Numbers(name="web"), Numbers(name="code", start=9))})
    after = make_job(data={"sources": (Numbers(name="code", start=9, weight=2.0),)})
    assert means(before, after, catalog) == {"data.sources.code.weight": "flag", "data.sources.web.type": "flag"}


def test_a_local_file_may_move(make_job, catalog):
    before = make_job()
    text = dump_job(before, catalog)
    old, new = (text.replace("forge_testing.tiny:TinyModel", f"/{place}/model.py:Net") for place in "ab")
    assert text_changes(old, new, catalog) == []


def test_a_component_that_has_moved_to_another_distribution_has_not_changed(make_job):
    catalog = Catalog.installed()
    table = tomllib.loads(dump_job(make_job(), catalog))
    old, new = (
        tomli_w.dumps({**table, "hooks": {"it": {"type": f"forge-plugin-{name}/spikes", "window": 64}}})
        for name in ("spikes", "resilience")
    )
    assert text_changes(old, new, catalog) == []
    moved = old.replace("window = 64", "window = 65")
    assert [change.path for change in text_changes(moved, new, catalog)] == ["hooks.it.window"]


# --- versions ----------------------------------------------------------------------------------------------------


def test_a_key_that_a_newer_version_added_has_not_changed_at_its_default(make_job, catalog):
    job = make_job()
    older = re.sub(r"^(dropout|grad_clip_norm|interval) = .*\n", "", dump_job(job, catalog), flags=re.MULTILINE)
    assert job_changes(older, job, catalog) == []
    assert means_of(older, make_job(grad_clip_norm=0.5), catalog) == {"train.grad_clip_norm": "flag"}


def means_of(text: str, job: Job, catalog) -> dict[str, str]:
    return {change.path: change.means for change in job_changes(text, job, catalog)}


def test_a_component_that_a_newer_version_added_has_not_changed_at_its_default(make_job, catalog):
    job = make_job()
    table = tomllib.loads(dump_job(job, catalog))
    del table["loss"], table["data"]["packing"]
    assert job_changes(tomli_w.dumps(table), job, catalog) == []


def test_a_key_that_a_newer_version_dropped_is_told_and_never_impossible(make_job, catalog):
    older = dump_job(make_job(), catalog).replace("dim = 16", "dim = 16\nwidth = 3")
    assert means_of(older, make_job(), catalog) == {"model.width": "flag"}


def test_a_component_that_is_not_installed_any_more_counts_as_its_kind(make_job, catalog):
    older = dump_job(make_job(), catalog).replace(
        "[loggers.console]", '[loggers.gone]\ntype = "forge-plugin-gone/gone"\n\n[loggers.console]'
    )
    assert means_of(older, make_job(), catalog) == {"loggers.gone.type": "safe"}


# --- resuming ----------------------------------------------------------------------------------------------------


def test_safe_changes_apply_at_once_and_are_told(resume, said):
    assert resume({}, {"checkpoint": {"interval": 1}}).step == 4
    assert "  safe:\n    train.steps: 2 -> 4\n    checkpoint.interval: 1000 -> 1" in said[0]


def test_other_changes_are_refused_with_all_three_groups_and_the_command(resume):
    with pytest.raises(CheckpointError) as caught:
        resume({}, {"optimizer": TinyAdamW(lr=1e-3), "model": TinyModel(dim=24)})
    lines = str(caught.value).splitlines()
    assert lines[1:7] == [
        "  safe:",
        "    train.steps: 2 -> 4",
        "  need --resume-with-changes:",
        "    optimizer.lr: 0.01 -> 0.001",
        "  impossible:",
        "    model.dim: 16 -> 24",
    ]
    assert "[checkpoint.load]" in lines[7]
    with pytest.raises(ResumeError) as caught:
        resume({"job": {"name": "x"}}, {"job": {"name": "x"}, "optimizer": TinyAdamW(lr=1e-3)})
    [*_, advice] = str(caught.value).splitlines()
    assert "--resume-with-changes" in advice


def test_with_the_flag_they_apply_and_are_told(resume, said, lines):
    summary = resume({}, {"optimizer": TinyAdamW(lr=1e-3)}, resume_with_changes=True)
    assert [record["lr"] for record in lines(summary)] == [0.01, 0.01, 0.001, 0.001]
    assert "need --resume-with-changes:\n    optimizer.lr: 0.01 -> 0.001" in said[0]


@pytest.mark.parametrize("changes", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_the_impossible_is_refused_even_with_the_flag_before_anything_is_built(
    resume, make_job, train, monkeypatch, changes
):
    with pytest.raises(CheckpointError, match=r"impossible:(.|\n)*\[checkpoint\.load\] with path = "):
        resume({}, changes, resume_with_changes=True)

    def built(*_: Any):
        raise AssertionError("it was built")

    monkeypatch.setattr("forge_core.engine.trainer.build_run", built)
    with pytest.raises(CheckpointError, match="impossible"):
        train(make_job(steps=4, **changes))


def test_counters_of_groups_go_to_the_groups_of_the_same_patterns(resume, make_job, train, lines):
    """Tables change places without meaning anything else, where no parameter matches two of them."""
    tables = (ParameterGroup(match="embed*", lr=0.5), ParameterGroup(match="*head*", lr=0.02))
    before, after = ({"optimizer": Tiring(groups=groups)} for groups in (tables, tables[::-1]))
    whole = train(make_job(steps=4, job={"name": "whole"}, **before))
    cut = resume(before, after, resume_with_changes=True)
    assert [record["loss"] for record in lines(cut)] == [record["loss"] for record in lines(whole)]


def test_counters_of_a_group_that_no_pattern_has_any_more_are_refused_by_name(resume):
    before, after = ({"optimizer": Tiring(groups=(ParameterGroup(match=match),))} for match in ("embed*", "*head*"))
    with pytest.raises(CheckpointError, match=naming("embed*", "*head*")):
        resume(before, after, resume_with_changes=True)


@define(kw_only=True, slots=False)
class Normed(Plugin):
    """Adds a module to the model."""

    trains: bool = True

    @hookimpl(wrapper=True)
    def forge_build_model(self):
        from forge_kit.nn.modules import LayerNorm

        model = yield
        model.norm.further = LayerNorm(TinyModel().dim).requires_grad_(self.trains)
        model.norm.register_forward_hook(lambda norm, inputs, output: norm.further(output))
        return model


def test_state_of_a_parameter_that_a_plugin_added_is_not_left_out_silently(resume):
    with pytest.raises(ResumeError, match=naming("norm.further.weight")):
        resume({"plugins": {"normed": Normed()}}, {}, resume_with_changes=True)


def test_frozen_weights_that_a_plugin_added_are_not_left_out_silently(resume, said):
    assert resume({"plugins": {"normed": Normed(trains=False)}}, {}, resume_with_changes=True).step == 4
    assert not lacks(said[0], "model.norm.further.weight")


def test_the_next_checkpoint_has_the_new_job(resume, train, make_job):
    changed = {"optimizer": TinyAdamW(lr=1e-3)}
    summary = resume({}, changed, resume_with_changes=True)
    assert "lr = 0.001" in json.loads((summary.folder / "checkpoints/step-4/manifest.json").read_text())["job"]
    assert train(make_job(steps=6, **changed)).step == 6


class TestSources:
    def test_one_that_comes_starts_at_its_first_sample_and_the_others_go_on(self, resume, catalog):
        one, two = Numbers(name="one"), Numbers(name="two", start=77)
        with pytest.raises(CheckpointError, match=naming("data.sources.two.type: (none) -> ")):
            resume({"data": {"sources": (one,)}}, {"data": {"sources": (one, two)}})
        summary = resume({"data": {"sources": (one,)}}, {"data": {"sources": (two, one)}}, resume_with_changes=True)
        assert drawn(summary) == {"one": 8 + 4, "two": 4}

    def test_one_that_goes_leaves_the_others_where_they_are(self, resume):
        both = (Numbers(name="one"), Numbers(name="two", start=77))
        summary = resume({"data": {"sources": both}}, {"data": {"sources": both[1:]}}, resume_with_changes=True)
        assert drawn(summary) == {"two": 4 + 8}

    def test_one_whose_size_has_changed_under_the_same_keys_needs_the_flag(self, resume, monkeypatch, make_job, train):
        train(make_job(steps=2))
        build = Numbers.build
        monkeypatch.setattr(Numbers, "build", lambda self, context: build(attrs.evolve(self, sequences=50), context))
        with pytest.raises(CheckpointError, match=naming("'0'", 64, 50, "--resume-with-changes")):
            train(make_job(steps=4))
        assert train(make_job(steps=4), resume_with_changes=True).step == 4


def drawn(summary) -> dict[str, int]:
    manifest = json.loads((summary.folder / f"checkpoints/step-{summary.step}/manifest.json").read_text())
    return {name: source["drawn"] for name, source in manifest["progress"]["samples"]["sources"].items()}


class TestHooks:
    def test_one_that_comes_starts_afresh(self, resume, said, lines):
        summary = resume({}, {"hooks": {"counter": Counter()}}, resume_with_changes=True)
        assert [record.get("seen") for record in lines(summary)] == [None, None, 1.0, 2.0]
        assert not lacks(said[0], "hook:hooks.counter")

    def test_one_that_gave_way_to_another_does_not_hand_its_state_on(self, resume):
        before, after = {"hooks": {"mine": Counter()}}, {"hooks": {"mine": Other()}}
        assert resume(before, after, resume_with_changes=True).step == 4

    def test_one_with_other_settings_keeps_its_state(self, resume, lines):
        before, after = {"hooks": {"mine": Counter()}}, {"hooks": {"mine": Counter(by=10)}}
        summary = resume(before, after, resume_with_changes=True)
        assert [record["seen"] for record in lines(summary)] == [1, 2, 12, 22]

    def test_one_that_goes_leaves_its_state_behind(self, resume, said):
        assert resume({"hooks": {"mine": Counter()}}, {}, resume_with_changes=True).step == 4
        assert not lacks(said[0], "hook:hooks.mine")

    def test_one_without_state_that_is_given_from_python_may_come(self, make_job, train):
        class Looks(TrainingHook):
            pass

        train(make_job(steps=2))
        assert train(make_job(steps=4), Looks()).step == 4

    def test_one_with_state_that_is_given_from_python_needs_the_flag(self, make_job, train):
        train(make_job(steps=2))
        with pytest.raises(CheckpointError, match=naming("hook:python.Counter", "--resume-with-changes")):
            train(make_job(steps=4), Counter())
        assert train(make_job(steps=4), Counter(), resume_with_changes=True).step == 4


def test_checkpoints_that_an_earlier_job_kept_elsewhere_are_not_forgotten(make_job, train, catalog):
    storage = catalog.load("storage", "forge-run/local")(folder="old")
    train(make_job(steps=2, checkpoint={"storage": storage}))
    with pytest.raises(CheckpointError, match=naming("run/old", "[checkpoint.storage]")):
        train(make_job(steps=4))


def test_another_run_may_be_continued_under_another_name(make_job, train, said, tmp_path):
    train(make_job(steps=2))
    other = make_job(steps=4, job={"name": "other"})
    assert train(other, resume=str(tmp_path / "run"), echo=said.append).step == 4
    assert 'job.name: "run" -> "other"' in said[0]


def test_the_first_party_components_say_which_keys_are_safe(catalog, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(
        """
        [train]
        steps = 2
        global_batch_size = 2
        seq_len = 8
        [model]
        type = "transformer"
        [data.tokenizer]
        type = "bytes"
        [[data.sources]]
        type = "python_stdlib"
        [loss]
        type = "chunked_cross_entropy"
        [optimizer]
        type = "adamw"
        """
    )
    before = load_job(job)
    changed = {
        "model.attention.backend": ('"math"', "safe"),
        "model.init_std": ("0.1", "safe"),
        "loss.chunk_tokens": ("7", "safe"),
        "optimizer.fused": ("false", "safe"),
        "hooks.samples": ("{}", "safe"),
        "data.sources.0.verify": ('"full"', "safe"),
        "model.norm.eps": ("1e-4", "flag"),
        "model.attention.rope.theta": ("5e5", "flag"),
        "loss.z_loss": ("0.1", "flag"),
        "optimizer.betas": ("[0.9, 0.99]", "flag"),
        "model.attention.heads": ("4", "impossible"),
        "model.ffn.hidden": ("64", "impossible"),
    }
    after = load_job(job, overrides=[f"--{path}={value}" for path, (value, _) in changed.items()])
    found = means(before, after, catalog)
    assert {path.removesuffix(".type"): meaning for path, meaning in found.items()} == {
        path: meaning for path, (_, meaning) in changed.items()
    }


def test_the_command_line_has_the_flag(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(TINY_JOB)
    assert main(["job.toml"]) == 0
    changed = ["--train.steps=6", "--optimizer.lr=0.5"]
    assert main(["job.toml", *changed]) == 2
    err = capsys.readouterr().err
    assert "need --resume-with-changes:\n    optimizer.lr: 0.01 -> 0.5" in err
    assert main(["job.toml", *changed, "--resume-with-changes"]) == 0
    [run] = (tmp_path / "runs").iterdir()
    assert json.loads((run / "end.json").read_text())["step"] == 6
