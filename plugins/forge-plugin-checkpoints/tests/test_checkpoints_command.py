"""`forge-run checkpoints`: what a run has saved, and what can be done with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from forge_core.checkpoint.run_folder import owned
from forge_core.checkpoint.state import model_tensors
from forge_core.cli import main
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ExitCode
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_testing import TinyAdamW, TinyModel, tiny_job
from forge_testing.refusals import lacks

Checkpoints = Callable[..., tuple[int, str, str]]
HEAD = ["STEP", "SAVED", "SIZE", "TOKENS", "EVAL/LOSS", "FILES", "(SIZES)"]


class Weights(TrainingHook):
    """Keeps the weights at the end."""

    def on_train_end(self, context):
        self.last = {name: tensor.detach().clone() for name, tensor in model_tensors(context.model).items()}


def trained(folder: Path, catalog: Catalog, *hooks: TrainingHook, **changes: Any) -> Path:
    job = tiny_job(str(folder), catalog, **changes)
    return Trainer(job, hooks=hooks, catalog=catalog, echo=lambda text: None).run().folder


@pytest.fixture(scope="module")
def weights() -> Weights:
    """Those of `run` at the end."""
    return Weights()


@pytest.fixture(scope="module")
def first_run(tmp_path_factory, catalog, weights) -> Path:
    return trained(tmp_path_factory.mktemp("once"), catalog, weights, steps=4, checkpoint={"interval": 2})


@pytest.fixture(scope="module")
def first_of_many(tmp_path_factory, catalog) -> Path:
    return trained(tmp_path_factory.mktemp("many"), catalog, steps=6, checkpoint={"interval": 1, "keep": 0})


@pytest.fixture
def run(first_run, tmp_path) -> Path:
    """A run of four steps, saved after 2 and 4, evaluated at the end."""
    return Path(shutil.copytree(first_run, tmp_path / "run"))


@pytest.fixture
def checkpoints(run, capsys) -> Checkpoints:
    """Run `forge-run checkpoints RUN …` in this process: exit code, standard output, standard error."""

    def call(*argv: str, of: Path = run) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(["checkpoints", str(of), *argv])
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capsys.readouterr())

    return call


def test_json_has_the_facts_of_each_checkpoint_and_of_damage(checkpoints, run) -> None:
    facts = json.loads(checkpoints("--json")[1])
    assert (facts["run"], facts["in_use_by"], facts["unfinished"]) == (str(run), "", [])
    assert [each["step"] for each in facts["checkpoints"]] == [2, 4]
    last = facts["checkpoints"][-1]
    manifest = json.loads((step(run, 4) / "manifest.json").read_text())
    assert (last["saved"], last["tokens"]) == (manifest["time"], manifest["tokens"])
    assert last["size"] == sum(file.stat().st_size for file in step(run, 4).iterdir())
    assert last["evaluation"] == manifest["evaluation"]
    assert last["faults"] == []
    victim = next(file for file in step(run, 2).iterdir() if file.name != "manifest.json")
    victim.write_bytes(bytes([victim.read_bytes()[0] ^ 1]) + victim.read_bytes()[1:])
    assert json.loads(checkpoints("--json")[1])["checkpoints"][0]["faults"] == []  # sizes only
    code, out, _ = checkpoints("verify", "--json")
    damaged, intact = json.loads(out)["checkpoints"]
    assert code == ExitCode.FAILED
    assert not lacks(damaged["faults"][0], victim, "SHA-256")
    assert intact["faults"] == []


def step(run: Path, number: int) -> Path:
    return run / f"checkpoints/step-{number}"


def flip(run: Path, number: int) -> Path:
    """Flip a bit of the tensors of a checkpoint; its sizes stay."""
    file = next(step(run, number).glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


class TestList:
    def test_it_is_what_the_command_does_by_default(self, checkpoints):
        assert checkpoints() == checkpoints("list")
        code, out, _ = checkpoints()
        head, *rows = [line.split() for line in out.splitlines()]
        assert (code, head) == (0, HEAD)
        assert [(row[0], row[-2], row[-1]) for row in rows[1:]] == [("4", rows[1][-2], "intact")]
        assert [rows[0][0], rows[0][-2], rows[0][-1]] == ["2", "64", "intact"]  # not evaluated yet: tokens come last
        assert float(rows[1][-2]) > 0

    def test_sizes_find_a_short_file_and_sha256_a_flipped_bit(self, checkpoints, run):
        file = flip(run, 4)
        assert "damaged" not in checkpoints()[1]
        code, out, _ = checkpoints("--full")
        assert (code, out.splitlines()[2].split()[-1]) == (0, "damaged")
        assert not lacks(out.splitlines()[-1], "step 4", file, "SHA-256")
        file.write_bytes(file.read_bytes()[:-1])
        assert "step-4" in checkpoints()[1].splitlines()[-1]

    def test_one_without_a_manifest_is_listed_as_damaged(self, checkpoints, run):
        (step(run, 2) / "manifest.json").unlink()
        out = checkpoints()[1]
        assert out.splitlines()[1].split()[-1] == "damaged"
        assert "step 2:" in out.splitlines()[-1]
        assert "manifest.json" in out.splitlines()[-1]

    def test_unfinished_ones_are_told(self, checkpoints, run):
        (run / "checkpoints/step-9.tmp").mkdir()
        assert not lacks(checkpoints()[1].splitlines()[-1], "step-9.tmp")

    def test_a_run_in_use_can_be_listed_and_its_owner_is_told(self, checkpoints, run):
        with owned(run):
            code, out, _ = checkpoints()
        assert code == 0
        assert not lacks(out.splitlines()[-1], f"process {os.getpid()}")
        assert len(checkpoints()[1].splitlines()) == len(out.splitlines()) - 1

    def test_checkpoints_are_found_where_the_job_puts_them(self, checkpoints, make_job, train, catalog):
        storage = catalog.load("storage", "forge-run/local")(folder="elsewhere")
        folder = train(make_job(steps=1, job={"name": "other"}, checkpoint={"storage": storage})).folder
        assert checkpoints(of=folder)[1].splitlines()[1].split()[0] == "1"

    def test_a_folder_without_any_says_so(self, checkpoints, tmp_path):
        code, out, _ = checkpoints(of=tmp_path)
        assert (code, len(out.splitlines()), lacks(out, tmp_path)) == (0, 1, [])

    def test_torch_is_not_imported(self, run, python):
        listing = f"import sys; from forge_core.cli import main; main(['checkpoints', {str(run)!r}])"
        done: subprocess.CompletedProcess[str] = python("-c", f"{listing}; print('torch' in sys.modules)")
        assert done.stdout.splitlines()[-1] == "False", done.stderr

    @pytest.mark.parametrize(("where", "fact"), [("nowhere", "no folder"), ("run/checkpoints/step-2", "checkpoint")])
    def test_anything_but_a_run_folder_is_refused(self, checkpoints, tmp_path, where, fact):
        code, out, err = checkpoints(of=tmp_path / where)
        assert (code, out) == (ExitCode.BAD_JOB, "")
        assert not lacks(err, tmp_path / where, fact)


class TestVerify:
    def test_intact_ones_are_told_and_the_code_is_0(self, checkpoints):
        code, out, _ = checkpoints("verify")
        assert code == 0
        assert [line.split(",")[0] for line in out.splitlines()] == ["step 2: intact", "step 4: intact"]

    def test_damage_names_file_and_fault_and_the_code_is_1(self, checkpoints, run):
        file = flip(run, 2)
        code, out, _ = checkpoints("verify")
        assert code == ExitCode.FAILED
        assert not lacks(out.splitlines()[0], "step 2", file, "SHA-256")
        assert out.splitlines()[1].startswith("step 4: intact")

    def test_a_folder_that_holds_another_step_than_its_name_says_is_named(self, checkpoints, run):
        (run / "checkpoints/step-4").rename(run / "checkpoints/step-9")
        code, out, _ = checkpoints("verify")
        assert code == ExitCode.FAILED
        assert not lacks(out.splitlines()[-1], "step 9", "step-9 holds step 4")

    def test_steps_may_be_named(self, checkpoints, run):
        flip(run, 2)
        assert checkpoints("verify", "4")[0] == 0
        code, _, err = checkpoints("verify", "3")
        assert (code, lacks(err, run, "step 3", "2, 4")) == (ExitCode.BAD_JOB, [])


class TestDiff:
    def test_a_checkpoint_does_not_differ_from_itself(self, checkpoints):
        out = checkpoints("diff", "4", "4")[1]
        assert not lacks(out, "job: the same")
        assert not lacks(out.splitlines()[-1], 0)

    def test_progress_and_values_are_told_the_largest_relative_difference_first(self, checkpoints, run, weights):
        code, out, _ = checkpoints("diff", "2", "4", "--all")
        assert code == 0
        assert "tokens: 64 -> 128" in out.splitlines()
        table = [line.split() for line in out.split("RELATIVE\n")[1].splitlines()]
        relative = [float(row[2]) for row in table]
        assert relative == sorted(relative, reverse=True)
        assert not lacks(out, len(table))
        names = {row[0] for row in table}
        assert {f"model.{name}" for name in weights.last} <= names
        facts = json.loads(checkpoints("diff", "2", "4", "--json")[1])
        assert (facts["first"], facts["second"]) == (str(step(run, 2)), str(step(run, 4)))
        assert {"key": "tokens", "before": 64, "after": 128} in facts["progress"]
        changed = [
            [each["name"], f"{each['largest']:.3g}", f"{each['relative']:.3g}"] for each in facts["tensors"]["changed"]
        ]
        assert changed == table
        assert (facts["job"], facts["tensors"]["reshaped"]) == ([], [])

    def test_differences_are_exact(self, checkpoints, make_job, train, tmp_path):
        class Shift(TrainingHook):
            def on_train_begin(self, context):
                with torch.no_grad():
                    context.model.norm.weight += 0.5

        frozen_ = {"steps": 1, "optimizer": TinyAdamW(lr=1e-30, weight_decay=0.0)}
        one = train(make_job(job={"name": "one"}, **frozen_)).folder
        other = train(make_job(job={"name": "other"}, **frozen_), Shift()).folder
        out = checkpoints("diff", str(one), str(other), "--all")[1]
        assert ["model.norm.weight", "0.5", "0.333"] in [line.split() for line in out.splitlines()]

    def test_what_only_one_has_and_other_shapes_are_told(self, checkpoints, make_job, train):
        model = TinyModel(dim=24, layers=1)
        other = train(make_job(steps=1, job={"name": "other"}, model=model)).folder
        out = checkpoints("diff", "4", str(other), "--all")[1].splitlines()
        assert "  model.layers.1.up.weight" in out
        assert "  model.embedding.weight: [32, 16] float32 -> [32, 24] float32" in out

    def test_the_jobs_are_compared_by_key(self, checkpoints, make_job, train):
        other = train(make_job(steps=4, job={"name": "other"}, optimizer=TinyAdamW(lr=1e-3))).folder
        job = checkpoints("diff", "4", str(other / "checkpoints/step-4"))[1].split("job:\n")[1]
        safe, others = job.split("  need --resume-with-changes:\n")
        assert {'    job.name: "run" -> "other"', "    checkpoint.interval: 2 -> 1000"} <= set(safe.splitlines())
        assert others.splitlines()[0] == "    optimizer.lr: 0.01 -> 0.001"
        facts = json.loads(checkpoints("diff", "4", str(other / "checkpoints/step-4"), "--json")[1])
        assert {"key": "optimizer.lr", "before": 0.01, "after": 0.001} in facts["job"]

    def test_long_lists_are_cut(self, checkpoints):
        assert checkpoints("diff", "2", "4")[1].splitlines()[-1].endswith("more (--all)")


class TestPrune:
    @pytest.fixture
    def many(self, first_of_many, tmp_path) -> Path:
        """A run that keeps all of six checkpoints."""
        return Path(shutil.copytree(first_of_many, tmp_path / "many"))

    def left(self, run: Path) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())

    def test_the_newest_are_kept(self, checkpoints, many):
        code, out, _ = checkpoints("prune", "--keep", "2", of=many)
        assert (code, self.left(many)) == (0, [5, 6])
        assert out.splitlines()[-1] == "4 of 6 deleted; staying: 5, 6"

    def test_by_default_the_job_decides(self, checkpoints, many):
        assert checkpoints("prune", of=many)[1].splitlines() == ["0 of 6 deleted; staying: 1, 2, 3, 4, 5, 6"]
        job = many / "job.toml"
        job.write_text(job.read_text().replace("keep = 0", "keep = 1").replace("keep_every = 0", "keep_every = 4"))
        checkpoints("prune", of=many)
        assert self.left(many) == [4, 6]

    def test_a_dry_run_only_tells(self, checkpoints, many):
        out = checkpoints("prune", "--keep", "5", "--dry-run", of=many)[1]
        assert not lacks(out.splitlines()[0], step(many, 1))
        assert not lacks(out.splitlines()[1], "1 of 6", "2, 3, 4, 5, 6")
        assert self.left(many) == [1, 2, 3, 4, 5, 6]
        for flags, left in ((["--dry-run"], [1, 2, 3, 4, 5, 6]), ([], [2, 3, 4, 5, 6])):
            facts = json.loads(checkpoints("prune", "--keep", "5", "--json", *flags, of=many)[1])
            steps = {"deleted": [1], "staying": [2, 3, 4, 5, 6]}
            assert facts == {"run": str(many), "dry_run": bool(flags), **steps}
            assert self.left(many) == left

    def test_nothing_is_deleted_when_what_would_stay_is_damaged(self, checkpoints, many):
        flip(many, 6)
        code, _, err = checkpoints("prune", "--keep", "1", of=many)
        assert code == ExitCode.FAILED
        assert not lacks(err, "intact")
        assert self.left(many) == [1, 2, 3, 4, 5, 6]

    def test_a_run_in_use_is_left_alone(self, checkpoints, many):
        with owned(many):
            code, _, err = checkpoints("prune", "--keep", "1", of=many)
        assert code == ExitCode.FAILED
        assert not lacks(err, f"process {os.getpid()}")
        assert self.left(many) == [1, 2, 3, 4, 5, 6]


class TestExport:
    def same(self, found: dict[str, torch.Tensor], weights: Weights) -> bool:
        return found.keys() == weights.last.keys() and all(torch.equal(found[n], weights.last[n]) for n in found)

    def test_one_file_holds_the_models_tensors_to_the_bit(self, checkpoints, weights, tmp_path):
        path = tmp_path / "out/model.safetensors"
        code, out, _ = checkpoints("export", "--out", str(path))
        assert (code, [*path.parent.iterdir()]) == (0, [path])
        assert out.startswith(f"{path}: ")
        assert self.same(load_file(path), weights)

    def test_its_metadata_tell_the_job_and_the_step(self, checkpoints, tmp_path, run):
        path = tmp_path / "model.safetensors"
        checkpoints("export", "--out", str(path), "--step", "2")
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        assert (metadata["format"], metadata["step"], metadata["tokens"]) == ("pt", "2", "64")
        assert tomllib.loads(metadata["job"]) == tomllib.loads((run / "job.toml").read_text())

    def test_json_has_the_files_and_their_checkpoint(self, checkpoints, tmp_path, run):
        path = tmp_path / "model.safetensors"
        facts = json.loads(checkpoints("export", "--out", str(path), "--step", "2", "--json")[1])
        assert facts == {
            "checkpoint": str(step(run, 2)),
            "step": 2,
            "out": str(path),
            "files": [{"file": str(path), "bytes": path.stat().st_size}],
        }

    def test_a_folder_gets_shards_with_an_index(self, checkpoints, weights, tmp_path):
        folder = tmp_path / "out"
        assert checkpoints("export", "--out", str(folder), "--shard-size", "-1")[0] == 2
        assert checkpoints("export", "--out", str(folder), "--shard-size", "4e-6")[0] == 0
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
        assert len(files) > 1
        assert [path.name for path in files] == sorted(set(index["weight_map"].values()))
        parts = {path.name: load_file(path) for path in files}
        assert self.same({name: parts[file][name] for name, file in index["weight_map"].items()}, weights)
        assert all(len(part) == 1 or sum(t.nbytes for t in part.values()) <= 4000 for part in parts.values())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.last.values())

    def test_a_small_model_is_one_file_in_the_folder(self, checkpoints, weights, tmp_path):
        checkpoints("export", "--out", str(tmp_path / "out"))
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"], "and no index of files"
        assert self.same(load_file(tmp_path / "out/model.safetensors"), weights)

    def test_the_newest_intact_one_is_taken(self, checkpoints, run, tmp_path):
        flip(run, 4)
        with pytest.warns(UserWarning, match="step-4"):
            checkpoints("export", "--out", str(tmp_path / "m.safetensors"))
        with safe_open(tmp_path / "m.safetensors", "pt") as file:
            assert file.metadata()["step"] == "2"

    def test_a_damaged_one_is_refused(self, checkpoints, run, tmp_path):
        file = flip(run, 4)
        code, _, err = checkpoints("export", "--out", str(tmp_path / "m.safetensors"), "--step", "4")
        assert code == ExitCode.FAILED
        assert f"{file} is damaged" in err
        assert not (tmp_path / "m.safetensors").exists()

    def test_nothing_is_overwritten(self, checkpoints, tmp_path):
        (tmp_path / "m.safetensors").write_text("mine")
        code, _, err = checkpoints("export", "--out", str(tmp_path / "m.safetensors"))
        assert code == ExitCode.BAD_JOB
        assert "exists already" in err
        assert (tmp_path / "m.safetensors").read_text() == "mine"


def test_on_a_terminal_there_is_a_table(checkpoints, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "│" in checkpoints()[1]
