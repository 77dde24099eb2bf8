"""No command writes over what is not Forge's: every option of every command that is a path, by what it is."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsers import OFFERS, parsed, parsers

from forge_core.cli import main
from forge_kit.tools.outputs import MARK

VALUES = {
    "A,B", "ADDRESS", "C", "GB", "GBITS", "GLOB", "JOBS", "K", "K=V,…", "KEY", "KEY=A,B", "KIND", "LIST", "M", "N",
    "NAME", "NAMES", "NATS", "ORG/NAME", "P", "R", "RATE", "REV", "S", "SHARE", "STEP", "T", "TEXT", "TYPE", "X",
}  # fmt: skip
"""Metavars of what is no path."""
INPUTS = """
inside attention path, inside attention --run, chat path, chat --run, check files, checkpoints run, checkpoints RUN diff
first, checkpoints RUN diff second, compare files, data files, doctor files, doctor --on,
doctor drill files, launch elastic
--resume, launch elastic files, evaluate path, evaluate --include, evaluate --run, inside extract files, generate path,
generate --image, generate --video, generate --run, profile goodput runs, doctor gpus files, init --text, init --tokens,
init --tokenizer, init --from, inside lens path, inside lens --run, data picture files, inside patch path, inside patch
--run, plan files, data prepare inputs, data prepare --job, data prepare --on, profile
profiles, replay run, replay --from, report runs,
resume run, resume --from, run --resume, run files, runs folders, inside sae run, inside sae files, show run, submit
files, submit --on, inside taps store, watch runs, weights inspect folder, weights import folder,
weights import --tokenizer, weights export run, weights verify first, weights verify second, weights verify --prompts,
launch local --resume, launch local files, plan --calibrate, ladder plan ladder, ladder plan --calibrate,
ladder run ladder, ladder fit ladder, ladder fit --points, ladder predict ladder, ladder predict --points,
ladder report ladder, ladder report --points, ladder submit ladder, ladder submit --on,
ladder check-coordinates files, ladder critical-batch run, data mix plan mix, data mix run mix,
data mix fit mix, data mix fit --results, data mix write mix, data mix write --results, data mix write --job,
data filter table, data dedup table, data decontaminate table, data stats table
"""
OTHERS = {
    "doctor --output": "it makes a folder of its own there, and removes it",
    "doctor --wait": "minutes",
    "explain path": "of keys",
    "data prepare --part": "a number, K/N",
}
OUTPUTS = {
    "inside attention --out": "inside attention RUN --prompt a --out={}.png",
    "checkpoints RUN export --out": "checkpoints RUN export --out={}",
    "checkpoints RUN merge --out": "checkpoints RUN merge --steps 1,2 --out={}",
    "ladder check-coordinates --out": "ladder check-coordinates JOB.toml --out={}.png",
    "data mix write --out": "data mix write MIX.toml --out={}.toml",
    "ladder critical-batch --out": "ladder critical-batch RUN --tokens=1 --out={}",
    "compare --out": "compare JOB.toml --out={}",
    "doctor drill --out": "doctor drill JOB.toml --out={}",
    "evaluate --out": "evaluate RUN --tasks a --out={}",
    "inside extract --out": "inside extract RUN --out={}",
    "profile goodput --picture": "profile goodput RUN --picture={}.svg",
    "init job": "init --stdlib {}",
    "inside lens --out": "inside lens RUN --prompt a --out={}.png",
    "data picture --out": "data picture JOB.toml --out={}.html",
    "new-plugin --dir": "new-plugin optimizer my_optimizer --dir={}",
    "inside patch --out": "inside patch RUN --clean a --corrupted b --out={}.png",
    "data prepare --out": "data prepare {here} --tokenizer bpe --out={}",
    "replay --scratch": "replay RUN --step 1 --scratch={}",
    "report --out": "report RUN --out={}.html",
    "inside sae --out": "inside sae RUN --out={}",
    "inside taps --out": "inside taps export STORE --to npz --out={}",
    "weights export --out": "weights export RUN --out={}",
    "weights import --out": "weights import FOLDER --out={}",
    "weights verify --report": "weights verify A B --report={}.json",
    "skills install --target": "skills install start-a-run --target={}",
}
"""A command line for each; the inputs that it names need not exist, as the output is looked at before."""
BELOW = {"new-plugin --dir": "forge-plugin-my-optimizer", "skills install --target": "start-a-run/SKILL.md"}
"""What a command makes in the folder that the option names."""


def paths() -> Iterator[str]:
    """Yields each argument of each command that is not known to be no path."""
    for offer in OFFERS:
        for parser in parsers(parsed(offer, []).parser):
            for action in parser._actions:
                is_value = (
                    action.nargs != 0 and not action.choices and not isinstance(action, argparse._SubParsersAction)
                )
                if is_value and action.metavar not in VALUES:
                    yield f"{parser.prog.removeprefix('forge-run ')} {[*action.option_strings, action.dest][0]}"


def test_every_path_is_known_to_be_read_or_written() -> None:
    read = INPUTS.replace("\n", " ").strip().split(", ")
    assert {*paths()} == {*read, *OUTPUTS, *OTHERS}


def facts(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Returns all that is in a folder, but for caches."""
    paths = (path for path in folder.rglob("*") if ".cache" not in path.parts)
    return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths}


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_what_is_there_survives(
    name: str, is_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = OUTPUTS[name].replace("{here}", str(tmp_path))
    word = next(word for word in line.split() if "{}" in word).rpartition("=")[2].replace("{}", "mine")
    for name_of_cache in ("MPLCONFIGDIR", "XDG_CACHE_HOME", "FORGE_CACHE", "HF_HOME"):
        monkeypatch.setenv(name_of_cache, str(tmp_path / ".cache"))
    monkeypatch.setenv("HOME", str(tmp_path))  # a path in the home folder, as the shell leaves it after an =
    place = tmp_path / word / BELOW.get(name, "")
    files = [place / each for each in ("job.toml", "comparison.md")] if is_folder else [place]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"# by hand\n")
    (tmp_path / ".cache").mkdir()
    before = facts(tmp_path)
    assert main(line.replace("{}", "~/mine").split()) == 2
    assert str(place) in capsys.readouterr().err
    assert facts(tmp_path) == before


@pytest.mark.parametrize("name", [name for name in OUTPUTS if ".png" in OUTPUTS[name] or ".html" in OUTPUTS[name]])
def test_what_a_command_has_written_is_no_obstacle(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = OUTPUTS[name].replace("{}", str(tmp_path / "made"))
    word = next(word for word in line.split() if str(tmp_path) in word).rpartition("=")[2]
    Path(word).write_text(f"<!-- {MARK} -->")
    assert main(line.split()) != 0
    assert word not in capsys.readouterr().err  # but of what is to be read, which is not there
