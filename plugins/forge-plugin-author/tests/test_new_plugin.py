"""`forge-run new-plugin`: what is refused, what is written, and that it is as good as a plugin of ours.

All kinds are linted and looked at in every run. An optimizer is also installed by pip, passes its own tests and trains
its job. `FORGE_NEW_PLUGIN=KIND` tries another kind instead, and `FORGE_TESTS=all` (`make test-all`) every one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hatchling.build import build_wheel

from forge_core import Catalog
from forge_core.contracts.errors import ExitCode
from forge_plugin_author.new_plugin import class_name, distribution_files, distribution_name, kinds, write
from forge_testing.distribution import check_distribution, distribution_problems
from forge_testing.processes import HANG_S
from forge_testing.refusals import lacks

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[3]
KINDS = kinds()
LONG = "a_name_as_long_as_they_come_30"
EVERYTHING = os.environ.get("FORGE_TESTS") == "all"
INSTALLED = KINDS if EVERYTHING else [os.environ.get("FORGE_NEW_PLUGIN", "optimizer")]


def generate(kind: str, name: str, folder: Path) -> Path:
    """Write a new distribution into `folder`; returns its own one."""
    write(distribution_files(kind, name, Catalog.installed()), folder / distribution_name(name))
    return folder / distribution_name(name)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "facts"),
    [
        ("optimiser", "mine", ["'optimiser'", "'optimizer'"]),
        ("every", "mine", ["'every'", "dataset, evaluation, executor"]),
        ("ffn", "mine", ["'ffn'", "forge-plugin-transformer 0.2.0"]),
        ("optimizer", "MyOptimizer-2", ["'MyOptimizer-2'", "'my_optimizer_2'"]),
        ("optimizer", "2nd", ["'2nd'", "'nd'"]),
        ("optimizer", "../up", ["'up'"]),
        ("optimizer", "lambda", ["'lambda'", "keyword", "'my_lambda'"]),
        ("optimizer", "a" * 31, [31, 30]),
        ("optimizer", "momentum", ["'momentum'", "module", "optimizer"]),
        ("plugin", "plugin", ["'plugin'", "'Plugin'", "'my_plugin'"]),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(
    forge_run: Run, tmp_path: Path, kind: str, name: str, facts: list[object]
) -> None:
    code, _, err = forge_run("new-plugin", kind, name, "--dir", str(tmp_path))
    assert code == ExitCode.BAD_JOB
    assert not lacks(err, *facts)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(forge_run: Run, tmp_path: Path) -> None:
    (tmp_path / "forge-plugin-mine").mkdir()
    code, _, err = forge_run("new-plugin", "loss", "mine", "--dir", str(tmp_path))
    assert code == ExitCode.BAD_JOB
    seen = f"{tmp_path}/forge-plugin-mine exists already, and nothing is overwritten"
    assert err == f"forge-run new-plugin: {seen}; choose another --dir\n"
    assert list((tmp_path / "forge-plugin-mine").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told(forge_run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = forge_run("new-plugin", "loss", "mine", "--dir", str(tmp_path / "file"))
    assert code == ExitCode.BAD_JOB
    assert "cannot write" in err


# --- what is written -----------------------------------------------------------------------------------------------


def test_there_is_a_template_for_every_kind_of_the_core_and_for_routers() -> None:
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert sorted({*entry_points["forge.kind"], "router"} - {"command"}) == KINDS  # a command is a function


def test_it_ends_with_what_to_do_next(forge_run: Run, tmp_path: Path) -> None:
    code, out, err = forge_run("new-plugin", "scheduler", "slow_fall", "--dir", str(tmp_path / "new folder"))
    assert (code, err) == (0, "")
    folder = tmp_path / "new folder" / "forge-plugin-slow-fall"
    assert out.splitlines() == [
        f"wrote {folder}:",
        "  README.md",
        "  forge_plugin_slow_fall/__init__.py",
        "  forge_plugin_slow_fall/py.typed",
        "  forge_plugin_slow_fall/slow_fall.py",
        "  job.toml",
        "  pyproject.toml",
        "  tests/conftest.py",
        "  tests/test_slow_fall.py",
        "",
        "install it, run its tests, and train with it:",
        f"  cd '{folder}'",
        "  pip install -e . pytest",
        "  pytest",
        "  forge-run job.toml",
    ]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "forge-plugin-slow-fall"
    assert project["dependencies"] == ["forge-run>=0.2,<0.3", "forge-kit>=0.2,<0.3"]
    assert project["entry-points"] == {"forge.scheduler": {"slow_fall": "forge_plugin_slow_fall:SlowFall"}}


@pytest.mark.parametrize("kind", KINDS)
def test_it_requires_the_kit_if_it_imports_it(kind: str) -> None:
    files = distribution_files(kind, "mine", Catalog.installed())
    requirements = tomllib.loads(files[Path("pyproject.toml")])["project"]["dependencies"]
    imports = any("forge_kit" in text for text in files.values())
    assert requirements == ["forge-run>=0.2,<0.3", *(["forge-kit>=0.2,<0.3"] if imports else [])]


def test_a_type_that_is_taken_is_written_with_a_warning(forge_run: Run, tmp_path: Path) -> None:
    code, _, err = forge_run("new-plugin", "optimizer", "muon", "--dir", str(tmp_path))
    assert code == 0
    offered, installed = err.splitlines()
    assert not lacks(offered, "warning", "'muon'", "forge-plugin-muon 0.2.0", "forge-plugin-muon/muon")
    assert not lacks(installed, "warning", "forge-plugin-muon 0.2.0", "installed")


# --- that it is good -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", LONG])
def test_every_kind_is_linted_whatever_its_name(tmp_path: Path, name: str) -> None:
    for kind in KINDS:
        for path in generate(kind, name, tmp_path / kind).rglob("*"):
            assert "template" not in path.name.lower()
            assert path.is_dir() or "template" not in path.read_text().lower(), path
    config = ["--config", "pyproject.toml", "--no-cache", str(tmp_path)]
    for command in (["check", *config], ["format", "--check", *config]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_kind_passes_the_check_of_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if one distribution offered all of them, which is looked at in a single process."""
    groups = ""
    for kind in KINDS:
        name = f"new_{kind}"
        folder = generate(kind, name, tmp_path)
        monkeypatch.syspath_prepend(str(folder))
        groups += f"[forge.{kind}]\n{name} = forge_plugin_{name}:{class_name(name)}\n"
    info = tmp_path / "site" / "forge_plugin_of_all_kinds-1.0.dist-info"
    info.mkdir(parents=True)
    requires = "Requires-Dist: forge-run>=0.2,<0.3\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: forge-plugin-of-all-kinds\nVersion: 1.0\n{requires}")
    (info / "entry_points.txt").write_text(groups)
    monkeypatch.syspath_prepend(str(info.parent))
    check_distribution("forge-plugin-of-all-kinds")


TRAIN_ALL = """
import pytest
from forge_core.cli import main

@pytest.mark.parametrize("folder", {folders!r})
def test_its_job_trains(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert main(["job.toml"]) == 0
"""


@pytest.mark.slow
def test_kinds_install_pass_their_tests_and_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stranger would do it, but for the folder into which pip installs, and for all kinds by one command each.

    The wheels are built in this process: for each, pip would start three. Only the job of the first kind, and its
    test of the distribution, have processes of their own; the other kinds' jobs share one.
    """
    site = tmp_path / "site"
    folders = {kind: generate(kind, f"new_{kind}", tmp_path) for kind in INSTALLED}
    first, *others = folders.values()
    environment = os.environ | {"PYTHONPATH": str(site)}

    def run(folder: Path, *module: str) -> None:
        command = [sys.executable, "-m", *module]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, f"{folder.name}: {' '.join(module)}\n{done.stdout}{done.stderr}"

    wheels = []
    for folder in folders.values():
        with contextlib.chdir(folder):
            wheels.append(str(tmp_path / build_wheel(str(tmp_path))))
    run(tmp_path, "pip", "install", "--quiet", "--no-deps", "--target", str(site), *wheels)
    (tmp_path / "test_jobs.py").write_text(TRAIN_ALL.format(folders=list(map(str, others))))
    alone = ["-k", f"{first.name.removeprefix('forge-plugin-').replace('-', '_')} or not test_the_distribution"]
    paths = [*map(str, folders.values()), *(["test_jobs.py"] if others else [])]
    run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *alone, *paths)
    run(first, "forge_core", "job.toml")
    monkeypatch.syspath_prepend(str(site))
    names = [folder.name for folder in folders.values()]
    assert distribution_problems({name: {} for name in names}) == {name: [] for name in names}
    for kind, folder in folders.items():
        assert (folder / "runs" / f"new_{kind}" / "metrics.jsonl").is_file()


@pytest.mark.slow
@pytest.mark.skipif(not EVERYTHING, reason="takes long; `make test-all` does it")
def test_every_kind_is_typed(tmp_path: Path) -> None:
    packages = [generate(kind, f"new_{kind}", tmp_path) / f"forge_plugin_new_{kind}" for kind in KINDS]
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *map(str, packages)]
    path = os.pathsep.join(str(package.parent) for package in packages)
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"MYPYPATH": path}, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
