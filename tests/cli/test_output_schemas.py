"""What commands print with `--json` is what their published schemas say, and error ids are explained."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from parsers import OFFERS, parsed, parsers

from forge_core import Catalog
from forge_core.cli import main
from forge_core.contracts.errors import JobError
from forge_core.contracts.run_end import Cause
from forge_kit.tools.output_schema import output_schema
from forge_plugin_author.error_ids import error_kinds
from forge_plugin_author.explain import find
from forge_plugin_runs.facts import RunFacts

DOCS = Path(__file__).parents[2] / "docs"
JOB = """
[job]
name = "tiny"
[train]
steps = 2
global_batch_size = 2
seq_len = 8
[model]
type = "transformer"
vocab_size = 260
dim = 16
layers = 1
attention = { type = "gqa", heads = 2 }
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "text"
path = "texts"
held_out_every = 2
[optimizer]
type = "adamw"
[eval]
interval = 1
[checkpoint]
interval = 1
"""
BROKEN = """
[train]
stepz = 2
global_batch_size = "2"
precision = "BF16"
[model]
type = "transformr"
[optimizer]
type = "./optimizer.py:Missing"
[[data.sources]]
type = "text"
path = "nowhere"
"""
CLEANING = {
    "filter": '[[filter]]\ntype = "regex"\nregex_exp = "number 1"',
    "dedup": '[dedup]\ntype = "exact"',
    "decontaminate": '[decontaminate]\nn_grams = 3\n[[decontaminate.tasks]]\ntype = "file"\npath = "item.jsonl"',
    "stats": '[[stats]]\ntype = "documents"',
}
"""Tables of `data filter` and its like: a file for each, so that none waits for another."""
LINES = """
check job.toml --data|check broken.toml|check job.toml --train.steps=0|check none.toml
explain|explain train.steps|explain optimizer.adamw|explain optimizer|explain unknown-key|explain hang
plan job.toml --world-size 2 --gpu h100|plan job.toml
runs|runs elsewhere
show runs/tiny
checkpoints runs/tiny|checkpoints runs/tiny verify|checkpoints runs/tiny diff 1 2
checkpoints runs/tiny prune --keep 1 --dry-run|checkpoints runs/tiny export --out weights.safetensors
compare runs/tiny
plugins|plugins adamw --check
skills list|skills install evaluate --target skills
replay runs/tiny --step 2
report runs/tiny --format md --out report.md
data job.toml --documents|data picture job.toml --out look.html
data filter filter.toml
data dedup dedup.toml|data decontaminate decontaminate.toml|data stats stats.toml
data prepare texts --out prepared --tokenizer bytes --held-out-every 2
data prepare texts --out parts --tokenizer bytes --part 1/2
inside lens runs/tiny --prompt ab --last 1|inside lens runs/tiny --list
inside attention runs/tiny --prompt ab
generate runs/tiny --prompt a --max-tokens 2
profile goodput runs/tiny
doctor --nproc 2
"""
"""Commands that are quick; what all others print is compared in their own tests, as `published_outputs` does it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of the commands, with a run."""
    folder = tmp_path_factory.mktemp("json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "texts").mkdir()
        (folder / "elsewhere").mkdir()
        for number in range(4):
            (folder / f"texts/{number}.txt").write_text("a text of some bytes\n" * 4)
        lines = [{"id": name, "text": f"text number {n}, which is short"} for n, name in enumerate("abcd")]
        (folder / "lines.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, lines[0]]))
        (folder / "item.jsonl").write_text(json.dumps({"context": "text", "choices": ["number 2, which"], "answer": 0}))
        for name, steps in CLEANING.items():
            (folder / f"{name}.toml").write_text(
                f'inputs = ["lines.jsonl"]\noutput = "clean-{name}"\ntasks = 1\nworkers = 1\n{steps}\n'
            )
        (folder / "job.toml").write_text(JOB)
        (folder / "broken.toml").write_text(BROKEN)
        assert main(["job.toml", "--loggers.console.style=off"]) == 0
        yield folder


@pytest.mark.parametrize("line", [line for lines in LINES.strip().splitlines() for line in lines.split("|")])
def test_what_is_printed_is_what_the_schema_says(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Compared where it is printed
    assert main([*line.split(), "--json"]) in (0, 1, 2)
    json.loads(capsys.readouterr().out)


def names() -> Iterator[str]:
    """Yields all commands that take `--json`, with their actions."""
    for offer in OFFERS:
        for parser in parsers(parsed(offer, []).parser):
            if "--json" in parser._option_string_actions:
                name = parser.prog.removeprefix("forge-run ").replace(" RUN", "")
                # Actions with the same options are no parsers, but a word
                choices = next((each.choices for each in parser._actions if each.dest == "action"), None)
                yield from (f"{name} {choice}".strip() for choice in choices or [""])


NAMES = [*names()]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_with_json_publishes_a_schema_whose_keys_are_on_the_page(name: str, catalog: Catalog) -> None:
    schema = output_schema(name, catalog)
    jsonschema.Draft202012Validator.check_schema(schema)
    page = (DOCS / "reference/json.md").read_text() + (DOCS / "launch.md").read_text()
    words = set(re.findall(r"`([\w-]+)`", page))
    assert [key for key in keys_in(schema) if key not in words] == []


def test_a_key_that_is_not_published_is_found(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFacts, "facts", lambda facts: {"run": "r", "more": 1})
    with pytest.raises(AssertionError, match="more"):
        main(["runs", "--json"])


@pytest.mark.parametrize(
    "line", ["job.toml --job.name=other", "show runs/tiny", "generate runs/tiny --prompt a --max-tokens 2"]
)
def test_without_a_terminal_nothing_is_coloured_or_asked(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # pytest has put a standard input in place that refuses to be read
    assert main(line.split()) == 0
    assert "\x1b" not in "".join(capsys.readouterr())


def keys_in(schema: Any) -> Iterator[str]:
    """Yields the keys of all objects of a schema."""
    if isinstance(schema, dict):
        properties = schema.get("properties", {}) if "type" in schema else {}
        yield from properties
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from keys_in(part)


@pytest.mark.parametrize(
    ("command", "hint"),
    [("shwo", "'show'"), ("run", "run has no --json"), ("checkpoints dif", "checkpoints diff"), ("inside", "command")],
)
def test_a_schema_that_is_not_published_is_an_error(
    command: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "schema", *command.split()]) == 2
    assert hint in capsys.readouterr().err


# --- ids of errors -------------------------------------------------------------------------------------------------


def problems(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str | None]]:
    """Id and suggestion of each problem, by its key."""
    capsys.readouterr()
    assert main([*line.split(), "--json"]) == 2
    return {each["key"]: (each["id"], each["suggestion"]) for each in json.loads(capsys.readouterr().out)["problems"]}


def test_each_mistake_has_its_id_and_what_may_be_meant(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems("check broken.toml", capsys) == {
        "train.steps": ("missing-key", None),
        "train.seq_len": ("missing-key", None),
        "train.stepz": ("unknown-key", "steps"),
        "train.global_batch_size": ("wrong-value", "2"),
        "train.precision": ("wrong-value", "bf16"),
        "model.type": ("unknown-type", "transformer"),
        "optimizer.type": ("broken-plugin", None),
    }
    assert problems("check job.toml --data.sources.0.path=nowhere", capsys) == {
        "data.sources.0.path": ("refused", None)
    }


def test_what_is_to_be_installed_is_a_suggestion(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = [offer for offer in Catalog.installed().offers() if offer.distribution.name != "forge-plugin-adamw"]
    monkeypatch.setattr(Catalog, "installed", lambda: Catalog(offers))
    found = problems("check job.toml", capsys)
    assert found == {"optimizer.type": ("unknown-type", None), "": ("not-installed", "pip install forge-plugin-adamw")}


def test_ids_of_problems_and_causes_are_explained_and_no_others() -> None:
    of_problems = {
        *("unknown-key", "missing-key", "wrong-value", "unknown-type", "not-installed", "broken-plugin", "refused"),
    }
    assert error_kinds().keys() == {*of_problems, *map(str, Cause)}
    for kind in error_kinds().values():
        assert (DOCS / kind.page).is_file() or kind.page == "reference/keys.md", kind


@pytest.mark.parametrize("id_", error_kinds())
def test_an_id_is_no_name_in_a_job(id_: str, catalog: Catalog) -> None:
    with pytest.raises(JobError):
        find(id_, catalog)


def test_a_misspelt_id_is_recognised(forge_run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = forge_run("explain", "unknown-kye")
    assert code == 2
    assert "'unknown-key'" in err
