"""`forge-run completion`: what follows a line, and the scripts in real shells."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_plugin_runs.completion import completions
from forge_testing.processes import HANG_S

JOB = '[train]\nsteps = 4\n[optimizer]\ntype = "forge-plugin-adamw/adamw"\n[[data.sources]]\ntype = "text"\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "notes.md").touch()
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny/.lock").touch()
    return tmp_path


def test_commands_and_job_files_come_first(project: Path) -> None:
    found = completions("forge-run ")
    assert {"run", "check", "show", "resume", "job.toml", "runs/"} <= set(found)
    assert "notes.md" not in found
    assert completions("forge-run che") == [each for each in found if each.startswith("che")]


def test_options_of_a_command_and_their_choices(project: Path) -> None:
    assert {"--world-size", "--help", "--train."} <= set(completions("forge-run check job.toml --"))
    assert completions("forge-run runs --so") == ["--sort"]
    assert "held-out" in completions("forge-run runs --sort ")
    assert completions("forge-run runs --sort=up") == ["--sort=updated"]
    assert completions("forge-run run job.toml --resume n") == ["never", "notes.md"]
    assert completions("forge-run runs --limit ") == []


def test_run_folders_where_a_run_is_meant(project: Path) -> None:
    assert completions("forge-run show ") == ["runs/"]
    assert completions("forge-run show runs/") == ["runs/tiny"]
    assert completions("forge-run show runs/tiny ") == []


def test_keys_of_the_job_with_the_components_that_its_files_name(project: Path) -> None:
    assert completions("forge-run job.toml --tra") == ["--train."]
    assert completions("forge-run job.toml --train.ste") == ["--train.steps="]
    assert completions("forge-run job.toml --train.precision=") == [
        f"--train.precision={each}" for each in ("bf16", "fp32", "fp64")
    ]
    assert completions("forge-run job.toml --train.det") == ["--train.deterministic="]
    assert completions("forge-run job.toml --train.deterministic=t") == ["--train.deterministic=true"]
    assert "--scheduler.type=constant" in completions("forge-run job.toml --scheduler.type=")
    assert completions("forge-run job.toml --checkpoint.storage.f") == ["--checkpoint.storage.folder="]
    assert completions("forge-run job.toml --parallel.rep") == ["--parallel.replicate."]


def test_a_line_that_makes_no_sense_completes_to_nothing(project: Path) -> None:
    for line in ("", "forge-run nothing ", "forge-run job.toml --nothing.at.all.", "forge-run check 'open "):
        assert "--world-size" not in completions(line)


def script(shell: str) -> str:
    command = [sys.executable, "-m", "forge_core", "completion", shell]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def typed(command: list[str], keys: dict[str, str], folder: Path) -> None:
    """Type into a shell on a terminal, and after each group of keys wait for what it must show since then."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        os.execvpe(command[0], command, {"PATH": path, "TERM": "dumb", "HOME": str(folder), "LANG": "C.UTF-8"})
    try:
        for key, expected in keys.items():
            os.write(terminal, key.encode())
            shown, deadline = "", time.monotonic() + HANG_S
            while expected not in shown:
                assert time.monotonic() < deadline, f"{expected!r} is not in {shown!r}"
                if select.select([terminal], [], [], 1.0)[0]:
                    shown += os.read(terminal, 4096).decode(errors="replace")
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


TYPED = {
    "forge-run sho\t": "forge-run show ",
    "ru\t": "runs/",
    "\t": "tiny",
    "\x15forge-run job.toml --train.precision=b\t": "precision=bf16",
    " --train.ste\t": "--train.steps=",
    "5\x15echo done\n": "done\r\n",
}


def test_bash_completes_on_a_terminal(project: Path) -> None:
    (project / "script").write_text(script("bash"))
    typed(["bash", "--norc", "--noprofile", "-i"], {"source ./script; echo ready-$?\n": "ready-0", **TYPED}, project)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes_on_a_terminal(project: Path) -> None:
    (project / "script").write_text(script("zsh"))
    start = "autoload -U compinit; compinit -u -D; source ./script; echo ready-$?\n"
    typed(["zsh", "-f", "-i"], {start: "ready-0", **TYPED}, project)


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(project: Path) -> None:
    (project / "script.fish").write_text(script("fish"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for line, expected in (("forge-run sho", "show"), ("forge-run job.toml --train.precision=b", "bf16")):
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source script.fish; complete -C '{line}'"],
            capture_output=True, text=True, env={"PATH": path, "HOME": str(project)},
        )  # fmt: skip
        assert expected in done.stdout, done.stderr
