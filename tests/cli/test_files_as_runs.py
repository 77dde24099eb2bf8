"""Each command that takes a RUN answers a file with a sentence that names the run, and exits with 2."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_core.plugins.catalog import Catalog

ARGUMENTS = {
    "inside attention": ["RUN", "--prompt", "a"],
    "chat": ["RUN"],
    "checkpoints": ["RUN", "list"],
    "compare": None,  # takes job files as well as run folders
    "evaluate": ["RUN", "--tasks", "hellaswag"],
    "inside extract": ["RUN", "--out", "store"],
    "generate": ["RUN", "--prompt", "a"],
    "profile goodput": ["RUN"],
    "init": None,  # `--from RUN` takes job files, too
    "inside lens": ["RUN", "--prompt", "a"],
    "inside patch": ["RUN", "--clean", "a", "--corrupted", "b"],
    "profile": ["RUN"],
    "replay": ["RUN", "--step", "1"],
    "report": ["RUN"],
    "resume": ["RUN"],
    "inside sae": None,  # takes files of TOML
    "show": ["RUN"],
    "submit": None,  # `--status job.toml` names the run by its job; other files are refused in the test of its command
    "watch": ["RUN", "--once"],
    "weights": ["export", "RUN", "--out", "out"],
}
"""Arguments of each command whose help has a RUN; None of one to which a file is no mistake."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    run = folder / "runs/mine"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("job.toml", "provenance.json", "metrics.jsonl"):
        (run / name).write_text("")
    (folder / "job.toml").write_text('[job]\nname = "mine"\n[model]\ntype = "transformer"\n')
    (folder / "weights.bin").write_bytes(bytes(8))
    return folder


def answer(*argv: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([*argv])
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue() if code == 0 else err.getvalue()


def test_every_command_that_takes_a_run_is_tried() -> None:
    names = [offer.type for offer in Catalog.installed().offers("command")]
    helps = {name: answer(*name.split(), "--help")[1] for name in names}
    takes = {name for name, text in helps.items() if re.search(r"\bRUN\b", text.partition("examples")[0])}
    assert takes <= set(ARGUMENTS), "add what they need to ARGUMENTS"


@pytest.mark.parametrize("name", [name for name, words in ARGUMENTS.items() if words is not None])
def test_a_file_is_no_run(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(folder)
    for file, expected in (
        ("job.toml", "job.toml is a file, and no run folder or checkpoint; its run is runs/mine"),
        ("runs/mine/metrics.jsonl", "is a file, and no run folder or checkpoint; its run is runs/mine"),
        ("weights.bin", "weights.bin is a file, and no run folder or checkpoint"),
    ):
        words = ARGUMENTS[name] or []
        code, text = answer(*name.split(), *(file if word == "RUN" else word for word in words))
        assert code == 2, text
        assert expected in text
