"""Skills for assistants are true: commands run, links resolve, the format's limits hold, and changed help is noticed.

Blocks of `bash` in a skill are run line by line in a folder with what skills name: `job.toml`, `texts`, the run
`runs/tiny`, and `published`, a model of another library. A line with `# exits with N` exits so, all others with 0.

`python tests/docs/test_skills.py` records the help of the commands that skills name: look at the skill first.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from fences import ROOT, Fence, fences, write_files
from skill_world import JOB, make_world

from forge_core import Catalog, JobError, load_job
from forge_core.cli import main
from forge_plugin_author.skill_files import MAIN, SHIPPED, head_of, shipped_skills

NAMES = sorted(path.parent.name for path in SHIPPED.glob(f"*/{MAIN}"))
TWELVE = """start-a-run write-a-plugin debug-a-divergence resume-and-recover choose-a-layout bring-a-model prepare-data
evaluate look-inside add-an-architecture submit-and-watch review-a-change"""
RECORD = SHIPPED / "help.json"
"""SHA-256 of the help of each command, by the skill that names it."""
NAMED = re.compile(r"forge-run ((?:[a-z-]+)(?: [a-z-]+)?)")
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
CODE = re.compile(r"# exits with (\d+)$")
NEED_MODEL = {"bring-a-model", "add-an-architecture"}
"""Skills about a published model, which is made for them alone: that imports another library."""
SLOW = {"add-an-architecture": pytest.mark.thorough}
"""It compares two models in a process of its own; the page on architectures has the same commands."""


# --- commands ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that skills name, but for the published model."""
    return make_world(tmp_path_factory.mktemp("skills"))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a published model with a tokenizer, as the page on importing makes it."""
    folder = tmp_path_factory.mktemp("published")
    [script] = [each for each in fences(ROOT / "docs/bring-a-model.md") if each.title == "published.py"]
    with contextlib.chdir(folder):
        exec(compile(script.text, "published.py", "exec"), {"__name__": "__main__"})
    return folder / "published"


def blocks(name: str) -> list[Fence]:
    """The fenced blocks of a skill."""
    return list(fences(SHIPPED / name / MAIN))


def lines(name: str) -> list[str]:
    """The commands of a skill, in order."""
    texts = [fence.text.replace("\\\n", " ") for fence in blocks(name) if fence.language == "bash"]
    return [line for text in texts for line in text.splitlines() if line.strip()]


def run(line: str) -> tuple[int, str]:
    """Run a line: commands of ours in this process, unless they start ranks. Returns exit code and output."""
    command, _, _ = line.partition("  #")
    words = shlex.split(command, comments=True)
    if words[0] == "forge-run" and "--nproc" not in words and words[1] != "plan":  # which takes no part in a group
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return main(words[1:]), output.getvalue()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    starts = {"forge-run": [sys.executable, "-m", "forge_core", *words[1:]], "python": [sys.executable, *words[1:]]}
    # A shell only where it is needed: the others are forks of this process (see `forked_starts.py`)
    has_shell = words[0] not in starts or ">" in command
    done = subprocess.run(
        ["bash", "-c", command] if has_shell else starts[words[0]],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in NAMES])
def test_each_command_of_a_skill_runs(
    name: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    shutil.copyfile(tmp_path / "job.toml", tmp_path / "changed.toml")  # under review
    if name in NEED_MODEL:
        shutil.copytree(request.getfixturevalue("published"), tmp_path / "published")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_files(blocks(name), tmp_path)
    assert lines(name)
    for line in lines(name):
        code, output = run(line)
        expected = int(match[1]) if (match := CODE.search(line)) else 0
        assert code == expected, f"{line}\n{output}"
        if "--json" in line.split() and code == 0:
            json.loads(output[min(map(output.find, filter(output.__contains__, "[{"))) :].strip())


@pytest.mark.parametrize("name", NAMES)
def test_jobs_of_a_skill_are_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Path) -> None:
    """Whole jobs pass the check; of others, the keys are known."""
    shutil.copytree(world / "texts", tmp_path / "texts")
    (tmp_path / "rest.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    write_files(blocks(name), tmp_path)
    for fence in blocks(name):
        if fence.language != "toml" or "cluster" in fence.table:
            continue
        files = [fence.title] if fence.is_whole_job else ["rest.toml", fence.title]
        try:
            load_job(*files, with_data=False)
        except JobError as error:
            pytest.fail(str(error))


def test_python_of_skills_compiles() -> None:
    for name in NAMES:
        for fence in blocks(name):
            if fence.language == "python":
                compile(fence.text, str(fence), "exec")


# --- the format ----------------------------------------------------------------------------------------------------


def faults(folder: Path) -> Iterator[str]:
    """Yields what breaks the open format, or what the format recommends and we demand."""
    text = (folder / MAIN).read_text(encoding="utf-8")
    _, head, body = text.split("---\n", 2)
    keys = yaml.safe_load(head)
    if not {"name", "description"} <= keys.keys() <= {"name", "description", "license", "compatibility", "metadata"}:
        yield f"keys {sorted(keys)}"
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", keys["name"]) or len(keys["name"]) > 64:
        yield f"name {keys['name']!r}"
    if keys["name"] != folder.name:
        yield f"name {keys['name']!r} in a folder {folder.name!r}"
    if not 0 < len(keys["description"]) <= 1024 or "Use when" not in keys["description"]:
        yield "description"
    if not all(isinstance(value, str) for value in keys.get("metadata", {}).values()):
        yield "metadata that are no texts"
    if len(body.splitlines()) >= 500:
        yield "body"
    for link in LINK.findall(body):
        if "://" not in link and not (folder / link).is_file():
            yield f"link {link}"


def test_the_twelve_skills_are_there() -> None:
    assert sorted(TWELVE.split()) == NAMES
    assert [skill.name for skill in shipped_skills()] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_skill_keeps_the_limits_of_the_format(name: str) -> None:
    assert list(faults(SHIPPED / name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_our_reader_of_heads_agrees_with_yaml(name: str) -> None:
    text = (SHIPPED / name / MAIN).read_text(encoding="utf-8")
    keys = yaml.safe_load(text.split("---\n", 2)[1])
    mine = head_of(text)
    assert (mine["name"], mine["description"]) == (keys["name"], keys["description"])
    assert mine["packages"] == keys["metadata"]["packages"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda text: text.replace("name: evaluate", "name: Evaluate"), "name 'Evaluate'"),
        (lambda text: text.replace("name: evaluate", "name: other"), "name 'other' in a folder 'evaluate'"),
        (lambda text: text.replace("description: ", f"description: {'x' * 1024}"), "description"),
        (lambda text: text.replace("Use when", "For when"), "description"),
        (lambda text: text + "line\n" * 500, "body"),
        (lambda text: text + "[x](references/none.md)\n", "link references/none.md"),
        (lambda text: text.replace("metadata:", "tools: all\nmetadata:"), "keys ['description'"),
    ],
)
def test_the_validator_finds_what_breaks_the_format(change: Callable[[str], str], fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "evaluate"
    folder.mkdir()
    (folder / MAIN).write_text(change((SHIPPED / "evaluate" / MAIN).read_text()))
    assert any(each.startswith(fault) for each in faults(folder)), list(faults(folder))


@pytest.mark.parametrize("name", NAMES)
def test_packages_of_a_skill_are_all_that_it_uses(name: str, catalog: Catalog) -> None:
    """Distributions of the commands that it names."""
    [skill] = [each for each in shipped_skills() if each.name == name]
    needed = {catalog.matching("command", command)[0].distribution.name for command in commands_of(name)}
    assert needed <= {*skill.packages}
    assert skill.missing() == []


def test_names_in_the_table_of_kinds_exist() -> None:
    text = (SHIPPED / "write-a-plugin/references/kinds.md").read_text()
    for kind, base, suite in re.findall(r"^\| `(\w+)` \| `(\w+)` \|.*\| `?(\w+)`? \|$", text, re.MULTILINE):
        assert getattr(importlib.import_module("forge_core"), base).kind == kind
        assert suite == "none" or hasattr(importlib.import_module("forge_testing.suites"), suite)


def test_the_repository_shows_the_same_skills() -> None:
    assert (ROOT / "skills").resolve() == SHIPPED


# --- help of commands ------------------------------------------------------------------------------------------------


def commands_of(name: str) -> list[str]:
    """The commands that a skill names, in blocks and in its text."""
    known = set(Catalog.installed().types("command"))
    text = "\n".join(path.read_text() for path in (SHIPPED / name).rglob("*.md"))
    found = {"run"} if re.search(r"forge-run \S+\.toml", text) else set()
    for words in NAMED.findall(text):
        found |= {words, words.split()[0]} & known if words in known else {words.split()[0]} & known
    return sorted(found)


def help_of(command: str) -> str:
    """SHA-256 of the help of a command, at a fixed width."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            main([*command.split(), "--help"])
    return hashlib.sha256(output.getvalue().encode()).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_help_of_the_commands_of_a_skill_is_as_it_was(name: str) -> None:
    recorded, today = json.loads(RECORD.read_text())[name], {each: help_of(each) for each in commands_of(name)}
    changed = sorted(each for each in recorded.keys() | today.keys() if recorded.get(each) != today.get(each))
    assert not changed, (
        f"help of {changed} is not as recorded: see whether {SHIPPED / name / MAIN} is still right, "
        f"then python {__file__} records it"
    )


if __name__ == "__main__":
    digests = {name: {command: help_of(command) for command in commands_of(name)} for name in NAMES}
    RECORD.write_text(json.dumps(digests, indent=1) + "\n")
