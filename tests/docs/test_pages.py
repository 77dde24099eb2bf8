"""What the pages show is true: jobs pass the check, commands print what is shown, everything offered is listed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import fences
import pytest
from fences import ALL, BROKEN, EXAMPLE, MAKE_DATA, NEED_EXAMPLE, ROOT, TEN_MINUTES, Fence

from forge_core import Catalog, JobError, Problem, Trainer, load_job
from forge_testing.catalogs import with_components

REST_OF_A_JOB = """
[train]
steps = 100000
global_batch_size = 8
seq_len = 64
[optimizer]
type = "forge_testing:TinyAdamW"
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "forge_testing:Numbers"
"""
"""What a fragment is layered over, to be checked like a job; with a model, unless it gives another one."""

PLAIN = """
[model]
type = "transformer"
vocab_size = 320
"""
WITH_IMAGES = """
[model]
type = "vision_language"
language = {type = "transformer", vocab_size = 320}
[model.vision.encoder]
type = "vit"
size = [32, 32]
"""

ABSENT = re.compile(r"matches no file|does not exist|there is no folder|FileNotFoundError")
"""The README of a plugin may name data and files that are not here."""

CHECKPOINTS = ("runs/text", *(f"runs/{run}/checkpoints/step-1000" for run in ("base", "language", "encoder")))
"""What the pages load weights from; jobs are only checked, so that these need not hold any."""

JOBS = [fence for fence in ALL if fence.is_job]
TINY = [
    fence
    for fence in JOBS
    if fence.is_whole_job
    and fence.table["model"]["type"].startswith("forge_testing:")
    and fence.page.parent != TEN_MINUTES  # whose jobs are run by their commands
]
WITH_COMMANDS = sorted({fence.page for fence in ALL if fence.commands})
WITH_TESTS = sorted({fence.page for fence in ALL if fence.title.startswith("test_")} - set(TEN_MINUTES.iterdir()))
KINDS = sorted(set(TEN_MINUTES.glob("*.md")) - {TEN_MINUTES / "index.md"})
"""Pages of one kind each."""
PROJECTS = [tomllib.loads(path.read_text())["project"] for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))]


@pytest.fixture
def visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, catalog: Catalog) -> Callable[[Path], Catalog]:
    """Go to a folder that holds the files of a page; returns what is installed there."""

    def go(page: Path) -> Catalog:
        fences.write_files([fence for fence in ALL if fence.page == page], tmp_path)
        for checkpoint in CHECKPOINTS:
            (tmp_path / checkpoint).mkdir(parents=True)
            (tmp_path / checkpoint / "manifest.json").touch()
        monkeypatch.chdir(tmp_path)
        if page not in NEED_EXAMPLE:
            return catalog
        monkeypatch.syspath_prepend(EXAMPLE)
        import forge_plugin_signsgd

        # Otherwise processes that have the installed example on their path are not forked: see `forked_starts.py`
        for name in [name for name in sys.modules if name.partition(".")[0] == "forge_plugin_signsgd"]:
            del sys.modules[name]
        return with_components(catalog, {"optimizer": {"signsgd": forge_plugin_signsgd.SignSGD}}, EXAMPLE.name)

    return go


def rest_of_a_job(fence: Fence) -> str:
    """What a fragment needs to be a job."""
    own = fence.table.get("model", {}).get("type")
    if own == "vision_language" or "vision." in fence.text or "[model.language." in fence.text:
        return REST_OF_A_JOB + WITH_IMAGES
    return REST_OF_A_JOB + (PLAIN if own in (None, "transformer") else "")


def problems(files: list[str], catalog: Catalog, ranks: int = 1) -> list[Problem]:
    try:
        load_job(*files, catalog=catalog, world_size=ranks)
    except JobError as error:
        return error.problems
    return []


def test_there_are_jobs_fragments_tiny_jobs_and_commands_to_check() -> None:
    assert {fence.is_whole_job for fence in JOBS} == {True, False}
    assert TINY
    assert WITH_COMMANDS


@pytest.mark.parametrize("fence", JOBS, ids=str)
def test_every_job_passes_the_check_and_every_fragment_as_part_of_one(fence: Fence, visit: Callable) -> None:
    catalog = visit(fence.page)
    Path("shown.toml").write_text(fence.text)
    Path("rest.toml").write_text(rest_of_a_job(fence))
    files = ["shown.toml"] if fence.is_whole_job else ["rest.toml", "shown.toml"]
    found = [str(problem) for problem in problems(files, catalog, fence.ranks)]
    may_lack_files = fence.page.is_relative_to(ROOT / "plugins") or fence.page in MAKE_DATA
    assert [problem for problem in found if not (may_lack_files and ABSENT.search(problem))] == []


@pytest.mark.parametrize("fence", TINY, ids=str)
def test_every_tiny_job_trains(fence: Fence, visit: Callable) -> None:
    catalog = visit(fence.page)
    Path("shown.toml").write_text(fence.text)
    job = load_job("shown.toml", catalog=catalog)
    assert Trainer(job, catalog=catalog, echo=lambda text: None).run().step == job.train.steps


@pytest.mark.parametrize("fence", [fence for fence in ALL if fence.title == BROKEN], ids=str)
def test_a_job_that_is_shown_as_broken_is_refused(fence: Fence, visit: Callable) -> None:
    catalog = visit(fence.page)
    with pytest.raises(JobError):
        load_job(BROKEN, catalog=catalog)


@pytest.mark.parametrize("fence", [fence for fence in ALL if fence.language == "python"], ids=str)
def test_every_python_block_compiles(fence: Fence) -> None:
    compile(fence.text, str(fence), "exec")


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_print_what_the_page_shows(page: Path, visit: Callable, installed_example: Path) -> None:
    visit(page)
    installed = installed_example if page in NEED_EXAMPLE else None
    for fence in [fence for fence in ALL if fence.page == page]:
        for command, shown in fence.commands:
            real = fences.printed(command, Path.cwd(), installed)
            assert fences.agrees(shown, real), (
                f"{fence}: $ {command}\n{real}\npython {fences.__file__} renews the pages"
            )


@pytest.mark.parametrize("page", WITH_TESTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_a_page_shows_pass(page: Path, visit: Callable, installed_example: Path) -> None:
    visit(page)
    files = [fence.title for fence in ALL if fence.page == page and fence.title.startswith("test_")]
    run_tests(files, installed_example)


@pytest.mark.thorough
def test_tests_of_the_pages_of_kinds_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one process, each page in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for page in KINDS:
        fences.write_files([fence for fence in ALL if fence.page == page], tmp_path / page.stem)
    run_tests([page.stem for page in KINDS])


def run_tests(paths: list[str], installed: Path | None = None) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed or "")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", KINDS, ids=lambda page: page.stem)
def test_the_page_of_a_kind_shows_a_component_a_job_its_output_and_a_test(page: Path) -> None:
    blocks = [fence for fence in ALL if fence.page == page]
    assert [fence.title for fence in blocks if fence.is_whole_job] == ["job.toml"]
    assert any(fence.commands for fence in blocks)
    [test] = [fence.title for fence in blocks if fence.title.startswith("test_")]
    assert test.removeprefix("test_") in [fence.title for fence in blocks]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project["name"])
def test_the_page_of_packages_lists_every_distribution_with_what_it_offers(project: dict) -> None:
    lines = (ROOT / "docs" / "packages.md").read_text().splitlines()
    [row] = [line for line in lines if line.startswith(f"| [`{project['name']}`](plugins/{project['name']}.md) |")]
    groups = project.get("entry-points", {}).items()
    types = [
        type_ for group, entries in groups if group.startswith("forge") and group != "forge.kind" for type_ in entries
    ]
    assert [type_ for type_ in types if f"`{type_}`" not in row] == []
