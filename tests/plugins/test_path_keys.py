"""Every key of a job that is a path is known to be one: `~` is the home folder, and files of the user's stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from forge_core import load_job
from forge_core.config import field_types
from forge_core.config.keys import resolved_fields
from forge_core.config.structure import complete_value, structure
from forge_core.config.tree import Origin, annotate
from forge_core.contracts.components import FilePath
from forge_core.contracts.errors import JobError
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog, first_party
from forge_testing import TINY_JOB

CATALOG = Catalog.installed()
READ = {
    "chat_template", "data_files", "file", "folder", "fonts", "held_out_fonts", "held_out_list", "held_out_path",
    "path", "reference", "store", "teacher", "words",
}  # fmt: skip
"""Names of keys that are paths of what a run reads."""
WRITTEN = {
    "cache": "copies of checkpoints, by their own names",
    "fast": "a folder for each run in it",
    "output": "a folder for each run in it: see below",
    "path": "of the cache `features`: files by their digests",
    "folder": "of the loggers: what trackio keeps, which it adds to; of `local`: step-N",
    "textfile": "see below",
    "tracking_uri": "what MLflow keeps, which it adds to",
}
"""Names of keys that are paths of what a run writes."""
NO_PATHS = {
    "accept_changes", "after", "answer", "architecture", "backend", "base_url", "before", "begin_of_text", "between",
    "best_metric", "branch", "chat_variables", "clip", "colours", "column", "completion", "config", "content", "device",
    "directions", "edits", "end", "end_of_text", "entity", "exclude", "factory", "fault", "field", "freeze",
    "gradients", "group", "held_out", "held_out_split", "host", "image", "image_token", "images", "include",
    "feature_row", "key", "labels", "layers", "lighthouse", "mask_column", "match", "messages", "metric", "name",
    "names", "options",
    "overview", "pattern", "placeholders", "point", "points", "prefix", "project", "prompt", "prompts", "references",
    "revision", "row_end", "segment_format", "segments", "server_url", "shapes", "single", "sink", "sound",
    "space_id", "special_tokens", "split", "start", "stop", "tags", "target", "targets", "text", "tile",
    "timestamp_format", "tools", "train", "url", "video_token", "videos",
}  # fmt: skip
"""Names of keys that are strings, and no paths."""
IN_RUN_FOLDER = {("sink:sae", "output"), ("sink:sae", "folder"), ("sink:probe", "folder"), ("sink:statistics", "file")}
IN_RUN_FOLDER |= {(f"logger:{name}", "file") for name in ("csv", "curves", "jsonl")}
"""Keys that are names below the run folder, and `output`, which is a point."""


def keys() -> Iterator[tuple[str, str, Any]]:
    """Yields the name of a component or section, of each of its keys that are strings, and the key's type.

    Clusters are no part of a job: their paths are those of other machines.
    """
    classes = {"job": Job}
    for offer in CATALOG.offers():
        known = first_party().get(offer.kind, {}).get(offer.type) or offer.distribution.name == "forge-run"
        if known and offer.kind not in ("command", "kind", "cluster") and attrs.has(cls := CATALOG.load_offer(offer)):
            classes[f"{offer.kind}:{offer.type}"] = cls
    while classes:
        name, cls = classes.popitem()
        for key, field in resolved_fields(cls).items():
            for leaf in leaves(field.type):
                if field_types.is_section(leaf):
                    classes[f"{name}.{key}"] = leaf
                elif isinstance(leaf, type) and issubclass(leaf, str) and not field_types.is_enum(leaf):
                    yield name, key, field.type


def leaves(type_: Any) -> Iterator[Any]:
    for member in field_types.members(type_):
        is_many = field_types.is_array(member) or field_types.is_mapping(member)
        yield from leaves(field_types.item_type(member)) if is_many else [member]


KEYS = [*keys()]
PATHS = {(name, key): type_ for name, key, type_ in KEYS if FilePath in leaves(type_)}


def test_every_string_is_known_to_be_a_path_or_none() -> None:
    plain = {(name, key) for name, key, _ in KEYS} - {*PATHS} - IN_RUN_FOLDER
    assert {key for _, key in plain} <= NO_PATHS, "a path is of type FilePath; what is none goes to NO_PATHS"
    assert {key for _, key in PATHS} == READ | {*WRITTEN}, "say whether the run reads it or writes it"


@pytest.mark.parametrize("name", PATHS, ids=":".join)
def test_a_tilde_is_the_home_folder(name: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    table = attrs.make_class("Table", {"key": attrs.field(type=PATHS[name])}, frozen=True)
    values: list[Any] = ["~/a", ["~/a"], {"x": "~/a"}]
    wanted = ["/home/me/a", ("/home/me/a",), {"x": "/home/me/a"}]
    for value, expanded in zip(values, wanted, strict=True):
        read, findings = structure(annotate({"key": value}, {}, Origin("job.toml")), table, CATALOG)
        if not findings.problems:  # of a type that the key accepts
            assert read.key == expanded
            made = tuple(value) if isinstance(value, list) else value
            assert complete_value(table(made), CATALOG)[0].key == expanded


# --- what a run writes -----------------------------------------------------------------------------------------------


def problems(*flags: str) -> set[str]:
    """Returns the keys that are at fault in a tiny job."""
    try:
        load_job(TINY_JOB, overrides=["--job.name=run", *flags], world_size=1)
    except JobError as error:
        return {problem.path for problem in error.problems}
    return set()


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()


@pytest.mark.parametrize("logger", ["csv", "curves", "jsonl"])
def test_a_logger_writes_within_the_run_folder(logger: str) -> None:
    key = f"loggers.{logger}.file"
    for path in ("/etc/motd", "~/notes.txt", "../notes.txt", "a/../../notes.txt"):
        assert problems(f"--{key}={path}") == {key}
    assert problems(f"--{key}=below/notes..txt") == set()


def test_two_loggers_do_not_write_one_file() -> None:
    assert problems("--loggers.second.type=jsonl") == {"loggers.jsonl.file", "loggers.second.file"}
    assert problems("--loggers.csv.file=metrics.jsonl") == {"loggers.jsonl.file", "loggers.csv.file"}
    assert problems("--loggers.second.type=jsonl", "--loggers.second.file=second.jsonl") == set()


@pytest.mark.parametrize("name", ["job.toml", "metrics.jsonl"])
def test_a_folder_with_files_of_the_user_is_no_run_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("# mine")
    assert problems("--job.output=.") == {"job.name"}
    (tmp_path / "run/provenance.json").write_text("{}")
    assert problems("--job.output=.") == set()


def test_a_textfile_of_another_program_stays(tmp_path: Path) -> None:
    (tmp_path / "node.prom").write_text("node_load1 0.5\n")
    flags = "--loggers.prometheus.textfile=node.prom", "--loggers.prometheus.port=0"
    assert problems(*flags) == {"loggers.prometheus.textfile"}
    (tmp_path / "node.prom").write_text("# TYPE forge_run_state gauge\nforge_run_state 1.0\n")
    assert problems(*flags) == set()


def test_paths_from_the_home_folder_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text("some text\n" * 50)
    (tmp_path / "held.txt").write_text(f"{tmp_path}/texts/a.txt\n")
    text = "--data.sources.0={type='text', path='~/texts', held_out_list='~/held.txt'}"
    keys = {"data.sources.0.path", "data.sources.0.held_out_list"}
    assert not problems(text, "--data.tokenizer.type=bpe") & keys
    assert problems(text, "--data.tokenizer.type=bpe", "--data.sources.0.held_out_list=~/no.txt") & keys
