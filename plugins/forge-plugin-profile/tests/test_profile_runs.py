"""Profiles of real runs, from a job file and by the command."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from attrs import define, frozen
from torch._dynamo.utils import counters

from forge_core import LoggerComponent, TrainingHook
from forge_core.cli import main
from forge_core.contracts.layout import Layout
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.plugins.catalog import Catalog
from forge_plugin_profile import Profile, plan_bounds
from forge_plugin_profile.model_facts import layer_flops
from forge_plugin_profile.profile import chosen_ranks
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import tiny_job
from forge_testing.layouts import LAYOUTS
from forge_testing.outcomes import losses_of
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, lacks, problems_of, refuses
from forge_testing.runs import tiny_run
from forge_testing.suites import HookSuite

MODEL = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=2))


class TestProfile(HookSuite):
    """A curve with it equals that without, to the bit; the window is in the middle of what the suite resumes."""

    component = Profile(start=2, steps=2, memory=True)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, catalog):
    """Folder and summary of a run on two ranks, sharded, each of which recorded two windows."""
    folder = tmp_path_factory.mktemp("profiled")

    def on_rank(rank):
        from forge_core.engine.trainer import Trainer

        hooks = {"profile": Profile(start=3, steps=2, every=4, ranks="all")}
        parts = {"parallel": LAYOUTS["fsdp2"].stages(catalog), "micro_batch_size": 4, "global_batch_size": 8}
        job = tiny_job(str(folder), catalog, model=MODEL, steps=8, hooks=hooks, **parts)
        return losses_of(Trainer(job, catalog=catalog, echo=lambda text: None).run())

    run_on_ranks(2, on_rank)
    return folder / "run"


def test_each_rank_writes_traces_that_know_their_rank_and_their_steps(profiled):
    assert sorted(path.name for path in (profiled / "profile").iterdir()) == ["step-3", "step-7"]
    for rank in (0, 1):
        with gzip.open(profiled / "profile" / "step-3" / f"rank-{rank}.pt.trace.json.gz") as file:
            trace = json.load(file)
        assert trace["distributedInfo"]["rank"] == rank
        steps = {event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep")}
        assert steps == {"ProfilerStep#3", "ProfilerStep#4"}
    assert not [path for path in profiled.rglob("*") if "unfinished" in path.name]


def test_ranges_of_steps_and_phases_nest(profiled):
    """One that begins in another and ends after it is drawn wrongly by viewers."""
    with gzip.open(profiled / "profile" / "step-3" / "rank-0.pt.trace.json.gz") as file:
        spans = [event for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    ranges = sorted((e["ts"], -e["ts"] - e["dur"]) for e in spans if e["name"].startswith(("ProfilerStep", "phase:")))
    around = []
    for start, minus_end in ranges:
        while around and around[-1] <= start:
            around.pop()
        assert not around or -minus_end <= around[-1] + 0.01
        around.append(-minus_end)
    assert len(ranges) > 10


def test_the_summary_says_where_a_step_goes(profiled):
    [facts, other] = json.loads((profiled / "profile" / "step-7" / "profile.json").read_text())["ranks"]
    assert (facts["rank"], other["rank"], facts["steps"], facts["first_step"]) == (0, 1, 2, 7)
    host = {row["name"]: row["host_s"] for row in facts["phases"]}
    assert {"data", "forward", "backward", "optimizer", "agreement of the ranks"} <= host.keys()
    # Between two phases a busy machine may take the processor away
    covered = sum(host.values()) / facts["step_s"]
    assert 0.8 < covered < 1.01, "phases cover the step, and do not overlap"
    assert host["backward"] > host["data"]
    layers = {row["name"]: row for row in facts["layers"]}
    assert list(layers) == ["layers.0", "layers.1", "outside the layers"]
    assert all(row["forward_s"] > 0 and row["backward_s"] > 0 for row in layers.values())
    assert {"attention", "ffn"} <= {row["name"] for row in facts["parts"]}
    assert {"all-gather", "reduce-scatter", "all-reduce"} & {row["kind"] for row in facts["collectives"]}
    assert 0 < facts["exposed_s"] <= facts["busy_s"]["communication"]
    text = (profiled / "profile" / "step-7" / "profile.md").read_text()
    assert text.startswith("# Steps 7 to 8, rank 0 (cpu, shard 2")
    assert "## Ranks" in text


def test_counted_flops_are_the_models_but_for_masked_pairs(profiled):
    """A rank has half of 64 tokens. Attention counts all pairs, the model half; its backward pass has 5/4 of 2."""
    facts = json.loads((profiled / "profile" / "step-3" / "profile.json").read_text())["ranks"][0]
    counted = sum(row["counted_flops"] for row in facts["parts"] if row["name"] in ("attention", "ffn"))
    stated = sum(row["flops"] for row in facts["layers"][:2])
    pairs = 2 * 32 * 2 * 2 * 16 * 8  # two layers, tokens, scores and mixing, width, keys: forward, over all pairs
    assert counted - pairs * (1 + 2.5) == pytest.approx(stated - pairs * 3 / 2)


def test_the_command_makes_the_same_summary_again_and_compares(profiled, capsys):
    window = profiled / "profile" / "step-7"
    before = (window / "profile.json").read_text(), (window / "profile.md").read_text()
    (window / "profile.json").unlink()
    assert main(["profile", str(profiled), "--write"]) == 0
    assert ((window / "profile.json").read_text(), (window / "profile.md").read_text()) == before
    assert capsys.readouterr().out == before[1]
    assert main(["profile", str(profiled / "profile" / "step-3"), str(profiled), "--rank", "1"]) == 0
    assert "A step of" in capsys.readouterr().out  # what is slower, if anything is, depends on the machine
    assert main(["profile", str(profiled), "--rank", "1", "--json"]) == 0
    assert [each["rank"] for each in json.loads(capsys.readouterr().out)["ranks"]] == [1]


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["{run}/nowhere"], ["{run}/nowhere", "exist"]),
        (["{run}", "--step", "4"], ["--step 4", "{run}", "3, 7"]),
        (["{run}", "--rank", "2"], ["rank 0, 1"]),
        (["{run}/job.toml"], ["{run}/job.toml", "file"]),
        (["{run}/.."], ["[hooks.profile]"]),
        (["{run}", "--write", "--rank", "0"], ["--write", "--rank"]),
    ],
)
def test_what_is_not_there_is_said_by_name(profiled, capsys, argv, facts):
    assert main(["profile", *(part.format(run=profiled) for part in argv)]) == 2
    assert not lacks(" ".join(capsys.readouterr().err.split()), *(fact.format(run=profiled) for fact in facts))


def test_a_window_without_a_trace_is_named(tmp_path, capsys):
    """As of a run that was killed within it."""
    (tmp_path / "profile/step-3").mkdir(parents=True)
    (tmp_path / "profile/step-3/rank-0.memory.pickle").touch()
    assert main(["profile", str(tmp_path)]) == 2
    assert not lacks(capsys.readouterr().err, tmp_path / "profile/step-3", "rank-R.pt.trace.json.gz")


@pytest.mark.parametrize(
    "content",
    [
        b"text",
        b"[]",
        b"{}",
        b'{"traceEvents": 3}',
        b'{"traceEvents": [3]}',
        gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9],
        gzip.compress(b'{"traceEvents": []}', mtime=0)[:12] + b"damaged",
    ],
    ids=["text", "list", "no events", "a number", "of numbers", "cut off", "damaged"],
)
def test_a_file_that_is_no_trace_is_named(tmp_path, capsys, content):
    path = tmp_path / f"trace.json{'.gz' if content.startswith(gzip.compress(b'')[:2]) else ''}"
    path.write_bytes(content)
    assert main(["profile", str(path)]) == 2
    assert not lacks(capsys.readouterr().err, path, "trace")


class TestBounds:
    """Of `forge-run plan`, whose output stands here for it."""

    def bounds(self, tmp_path, monkeypatch, code, output, rank=1):
        (tmp_path / "job.toml").touch()
        done = SimpleNamespace(returncode=code, stdout=output, stderr="")
        monkeypatch.setattr(plan_bounds.subprocess, "run", lambda *_, **__: done)
        return plan_bounds.plan_bounds(tmp_path / "profile/step-1/rank-1.pt.trace.json.gz", 4, rank, "h100")

    def test_a_trace_that_was_moved_has_none(self, tmp_path):
        with refuses("", "--gpu", tmp_path / "rank-0.pt.trace.json", "job.toml"):
            plan_bounds.plan_bounds(tmp_path / "rank-0.pt.trace.json", 1, 0, "h100")

    def test_words_of_a_plan_that_fails_are_shown(self, tmp_path, monkeypatch):
        with refuses("", "forge-plugin-plan", "no such GPU"):
            self.bounds(tmp_path, monkeypatch, 2, "no such GPU")

    @pytest.mark.parametrize(("failure", "fact"), [("out of memory", "out of memory"), ("", "not simulated")])
    def test_a_rank_without_bounds_has_the_reason(self, tmp_path, monkeypatch, failure, fact):
        stages = [{"seconds_at_least": {"compute": 1.0}}, {"seconds_at_least": None, "failure": failure}]
        output = json.dumps({"ranks": stages})
        assert self.bounds(tmp_path, monkeypatch, 0, output) == {"compute": 1.0}
        with refuses("", "rank 2", fact):
            self.bounds(tmp_path, monkeypatch, 0, output, rank=2)


def test_a_second_profile_is_refused(tmp_path):
    hooks = {"profile": Profile(start=1), "more": Profile(start=2)}
    job = tiny_job(str(tmp_path), Catalog.installed(), device="cpu", hooks=hooks)
    facts = ("one profiler", "`every`")
    check_problems(problems_of(job), at("hooks.profile", *facts), at("hooks.more", *facts))


def test_the_bounds_of_the_plan_stand_beside_what_was_measured(profiled, capsys):
    assert main(["profile", str(profiled), "--gpu", "h100"]) == 0
    text = capsys.readouterr().out
    table = text.partition("## Bounds of the plan (h100)")[2]
    assert "Largest gap: step, if all overlaps" in table
    assert "| communication (shard" in table


def test_compiled_blocks_have_no_more_graphs_and_the_same_curve(tmp_path, catalog, train):
    def run(name, **hooks):
        torch._dynamo.reset()
        counters.clear()
        parallel = LAYOUTS["compiled"].stages(catalog)
        job = tiny_job(str(tmp_path), catalog, model=MODEL, steps=4, parallel=parallel, job={"name": name}, **hooks)
        losses = losses_of(train(job))
        return losses, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    plain = run("plain")
    assert run("profiled", hooks={"profile": Profile(start=1, steps=2)}) == plain  # marked before the first trace
    window = tmp_path / "profiled" / "profile" / "step-1"
    text = (window / "profile.md").read_text()
    assert "| layers.1 " in text, "blocks are marked"
    assert "By part" not in text, "what is inside of compiled code is not"
    with gzip.open(window / "rank-0.pt.trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("CompiledFunction") == 4, "two layers in two steps ran compiled"


@define(kw_only=True, slots=False)
class Keep(TrainingHook):
    """Keeps the model, and ends the run after some step."""

    step: int

    def on_step_end(self, context):
        self.model = context.model
        if context.step == self.step:
            context.request_stop("as the test says")


@pytest.mark.parametrize("steps", [2, 4], ids=["stopped while it warms up", "whole"])
def test_nothing_of_it_stays_behind(tmp_path, train, make_job, steps):
    listeners = [*ProgressBeacon.listeners]
    kept = Keep(step=steps)
    train(make_job(model=MODEL, steps=4, hooks={"profile": Profile(start=3, steps=1)}), kept)
    assert ProgressBeacon.listeners == listeners
    assert all(module._compiled_call_impl is None for module in kept.model.modules())
    assert (tmp_path / "run" / "profile").exists() == (steps == 4)


def test_layers_have_the_flops_of_the_whole_model_under_every_layout(tmp_path, catalog):
    def of(name):
        case = {"parallel": LAYOUTS[name].stages(catalog), "micro_batch_size": LAYOUTS[name].micro_batch_size}
        return layer_flops(tiny_run(tmp_path, model=MODEL, global_batch_size=8, **case).model, 8)

    names = ("fsdp2", "tp2", "pp2")
    first, second = run_on_ranks(2, lambda rank: {name: of(name) for name in names})
    whole = layer_flops(tiny_run(tmp_path, model=MODEL).model, 8)
    assert all({**first[name], **second[name]} == whole for name in names)
    assert [len(first[name]) for name in names] == [2, 2, 1]


@frozen(kw_only=True)
class Files(LoggerComponent):
    """A logger that takes files."""

    taken: ClassVar[dict[str, str]] = {}

    def build(self, context):
        return self

    def start(self, step):
        self.taken.clear()

    def artifact(self, path, name, step):
        self.taken[name] = path.read_text()

    def log(self, record): ...
    def close(self): ...


def test_a_window_that_the_run_ends_in_has_the_steps_that_there_were(train, make_job, tmp_path):
    hook = Profile(start=2, steps=5, memory=True, stacks=True, shapes=False)
    train(make_job(steps=3, hooks={"profile": hook}, loggers={"files": Files()}))
    assert Files.taken["profile-step-2.md"].startswith("# Steps 2 to 3, rank 0")
    [facts] = json.loads((tmp_path / "run" / "profile" / "step-2" / "profile.json").read_text())["ranks"]
    assert facts["steps"] == 2
    with gzip.open(tmp_path / "run" / "profile" / "step-2" / "rank-0.pt.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert facts["allocated_gb"] > 0
    assert "python_function" in {event.get("cat") for event in events}
    assert not any("Input Dims" in event.get("args", ()) for event in events)


def test_ranks_are_one_of_each_pipeline_stage():
    assert list(chosen_ranks("one_per_group", Layout(pp=2, shard=2, tp=2))) == [0, 4]
    assert list(chosen_ranks("one_per_group", Layout(shard=4))) == [0]
    assert list(chosen_ranks("all", Layout(shard=3))) == [0, 1, 2]
    assert chosen_ranks((2, 1), Layout(shard=4)) == [1, 2]


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (Profile(start=9), at("hooks.profile.start", "step 9", "train.steps is 4")),
        (Profile(start=1, ranks=(0, 2)), at("hooks.profile.ranks", "rank 2", 2, 0)),
        (Profile(start=1, ranks=()), at("hooks.profile.ranks", "empty")),
        (Profile(start=1, ranks=(1, 1)), at("hooks.profile.ranks", "twice")),
        (Profile(start=1, steps=3, every=3), at("hooks.profile.every", 3, "overlap")),
        (Profile(start=1, snapshot=True), at("hooks.profile.snapshot", 'train.device is "cpu"')),
    ],
)
def test_what_cannot_work_is_refused_when_the_job_is_checked(tmp_path, hook, expected):
    job = tiny_job(str(tmp_path), Catalog.installed(), device="cpu", hooks={"profile": hook})
    check_problems(problems_of(job, 2), expected)
