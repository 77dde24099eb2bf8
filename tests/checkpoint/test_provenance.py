"""Provenance: what a run records of itself, and what a continued run makes of it."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from forge_core.checkpoint.run_diff import check_tokenizer, collect_provenance, compare_provenance
from forge_core.contracts.errors import ResumeError
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog, core_version
from forge_testing import tiny_job
from forge_testing.refusals import lacks, naming

NOTHING_REPLACED = Catalog([])
ROUTER = """
from forge_testing import TinyModel


class Local(TinyModel):
    pass
"""


def test_only_what_the_job_uses_is_recorded(make_job, catalog):
    record = collect_provenance(make_job(), catalog)
    assert list(record["distributions"]) == ["forge-run"]
    assert record["distributions"]["forge-run"]["version"] == core_version()
    assert record["components"]["loss"] == "forge-run/cross_entropy"
    assert {"python", "torch"} <= record.keys()
    assert record["threads"] == (0 if torch.cuda.is_available() else torch.get_num_threads())
    json.dumps(record)


def test_other_threads_are_a_warning_as_sums_depend_on_their_number():
    was, now = {**recorded(), "threads": 1, "torch": "2.13.0"}, {**recorded(), "threads": 2, "torch": "2.13.0"}
    [warning] = compare_provenance(was, now, NOTHING_REPLACED)
    assert not lacks(warning, "threads", 1, 2)
    assert compare_provenance(recorded(), now, NOTHING_REPLACED) == []


def test_a_local_file_is_recorded_by_its_hash(make_job, tmp_path):
    import hashlib

    path = tmp_path / "local.py"
    path.write_text(ROUTER)
    catalog = Catalog.installed()
    job = make_job(model=catalog.load("model", f"{path}:Local")())
    record = collect_provenance(job, catalog)
    assert record["files"] == {str(path): hashlib.sha256(ROUTER.encode()).hexdigest()}
    assert record["components"]["model"] == f"{path}:Local"


def recorded(**distributions):
    return {"distributions": distributions, "files": {}}


def test_a_missing_distribution_is_refused_with_the_command_that_installs_it():
    was = recorded(**{"forge-plugin-sophia": {"version": "0.3.1"}})
    with pytest.raises(ResumeError, match=naming("pip install forge-plugin-sophia==0.3.1")):
        compare_provenance(was, recorded(), NOTHING_REPLACED)


def test_a_distribution_that_another_has_replaced_is_not_missing():
    catalog = Catalog([], {"forge-plugin-sophia": "forge-plugin-optimizers"})
    was = recorded(**{"forge-plugin-sophia": {"version": "0.3.1"}})
    assert compare_provenance(was, recorded(**{"forge-plugin-optimizers": {"version": "0.3.1"}}), catalog) == []
    [warning] = compare_provenance(was, recorded(**{"forge-plugin-optimizers": {"version": "0.4.0"}}), catalog)
    assert not lacks(warning, "forge-plugin-optimizers", "0.3.1", "0.4.0")
    with pytest.raises(ResumeError, match=naming("pip install forge-plugin-optimizers==0.3.1")):
        compare_provenance(was, recorded(), catalog)


def test_a_distribution_of_which_one_type_has_moved_is_compared_as_before():
    catalog = Catalog([], {"forge-plugin-sophia/lion": "forge-plugin-lion"})
    was = recorded(**{"forge-plugin-sophia": {"version": "0.3.1"}})
    assert compare_provenance(was, was, catalog) == []
    with pytest.raises(ResumeError, match=naming("pip install forge-plugin-sophia==0.3.1")):
        compare_provenance(was, recorded(**{"forge-plugin-lion": {"version": "0.3.1"}}), catalog)


def test_another_version_is_a_warning_with_both():
    was = recorded(**{"forge-run": {"version": "0.0.9"}})
    now = recorded(**{"forge-run": {"version": "0.1.0", "commit": "abc"}})
    [warning] = compare_provenance(was, now, NOTHING_REPLACED)
    assert not lacks(warning, "forge-run", "0.0.9", "0.1.0 (abc)")


def test_with_changes_a_missing_distribution_is_a_warning():
    was = recorded(**{"forge-plugin-sophia": {"version": "0.3.1"}})
    [warning] = compare_provenance(was, recorded(), NOTHING_REPLACED, with_changes=True)
    assert not lacks(warning, "forge-plugin-sophia 0.3.1")


def test_a_file_that_has_moved_is_known_by_its_name():
    was, now = recorded(), recorded()
    was["files"], now["files"] = {"/a/r.py": "1"}, {"/b/r.py": "1"}
    assert compare_provenance(was, now, NOTHING_REPLACED) == []
    now["files"] = {"/b/r.py": "2"}
    [warning] = compare_provenance(was, now, NOTHING_REPLACED)
    assert not lacks(warning, "/a/r.py")


def test_another_tokenizer_is_refused():
    with pytest.raises(ResumeError, match=naming("tokenizer")):
        check_tokenizer(recorded() | {"tokenizer": "a"}, recorded() | {"tokenizer": "b"})


def test_a_changed_file_is_a_warning():
    was, now = recorded(), recorded()
    was["files"], now["files"] = {"/r.py": "1"}, {"/r.py": "2"}
    [warning] = compare_provenance(was, now, NOTHING_REPLACED)
    assert not lacks(warning, "/r.py")


def test_it_is_kept_in_the_run_folder_and_in_every_checkpoint(make_job, train):
    summary = train(make_job(checkpoint={"interval": 2}))
    kept = json.loads((summary.folder / "provenance.json").read_text())
    for step in (2, 4):
        manifest = json.loads((summary.folder / f"checkpoints/step-{step}/manifest.json").read_text())
        # The folder of the start is of this machine, and no part of a checkpoint
        assert manifest["provenance"] | {"started_in": str(Path.cwd())} == kept
        assert manifest["job"] == (summary.folder / "job.toml").read_text()


def test_a_continued_run_warns_of_another_version(make_job, train):
    summary = train(make_job(steps=2))
    path = summary.folder / "checkpoints/step-2/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["provenance"]["distributions"]["forge-run"]["version"] = "0.0.1"
    path.write_text(json.dumps(manifest))
    with pytest.warns(UserWarning, match=naming("forge-run", "0.0.1")):
        train(make_job(steps=3))


class TestARealDistribution:
    """One that is installed for a run and then changes, or goes."""

    @pytest.fixture
    def install(self, tmp_path, monkeypatch):
        site = tmp_path / "site"
        site.mkdir()
        (site / "throwaway.py").write_text(
            "from attrs import define\nfrom forge_core import TrainingHook\n"
            "@define(kw_only=True, slots=False)\nclass Watch(TrainingHook):\n    pass\n"
        )
        monkeypatch.syspath_prepend(site)

        def put(version: str | None) -> Catalog:
            """The catalog with this version of it, or without it."""
            for old in site.glob("*.dist-info"):
                shutil.rmtree(old)
            if version is not None:
                info = site / f"forge_plugin_throwaway-{version}.dist-info"
                info.mkdir()
                (info / "METADATA").write_text(
                    f"Metadata-Version: 2.1\nName: forge-plugin-throwaway\nVersion: {version}\n"
                )
                (info / "entry_points.txt").write_text("[forge.hook]\nwatch = throwaway:Watch\n")
            importlib.invalidate_caches()
            return Catalog.installed()

        return put

    def run(self, catalog, tmp_path, steps, hooks=("watch",), **options):
        made = {name: catalog.load("hook", name)() for name in hooks}
        job = tiny_job(str(tmp_path), catalog, steps=steps, hooks=made)
        return Trainer(job, catalog=catalog, echo=lambda text: None, **options).run()

    def test_another_version_is_a_warning_with_both(self, install, tmp_path):
        self.run(install("1.0"), tmp_path, 2)
        with pytest.warns(UserWarning, match=naming("forge-plugin-throwaway", "1.0", "1.1")):
            assert self.run(install("1.1"), tmp_path, 4).step == 4

    def test_without_it_the_run_refuses_with_the_command_that_installs_it(self, install, tmp_path):
        self.run(install("1.0"), tmp_path, 2)
        with pytest.raises(ResumeError, match=naming("pip install forge-plugin-throwaway==1.0")):
            self.run(install(None), tmp_path, 4, hooks=())
        with pytest.warns(UserWarning, match=naming("forge-plugin-throwaway 1.0")):
            assert self.run(install(None), tmp_path, 4, hooks=(), resume_with_changes=True).step == 4
