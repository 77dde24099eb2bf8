"""`forge-run doctor` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_testing.refusals import lacks

pytestmark = pytest.mark.slow

JOB = """
[job]
output = "elsewhere"
[train]
steps = 2
global_batch_size = 2
seq_len = 8
[model]
type = "forge_testing:TinyModel"
[[data.sources]]
type = "forge_testing:Numbers"
[optimizer]
type = "forge_testing:TinyAdamW"
"""

# `forge-run` on a broken network, which adds numbers wrongly: rank 1 receives a sum that is one too large in one place.
# The ranks, which are forks of this process, inherit the network.
BROKEN = """
import sys

import torch.distributed as dist

from forge_core.cli import main

right = dist.all_reduce


def all_reduce(tensor, *args, **kwargs):
    done = right(tensor, *args, **kwargs)
    if dist.get_rank() == 1 and len(tensor) > 5000:
        tensor[4321] += 1
    return done


dist.all_reduce = all_reduce

if __name__ == "__main__":
    sys.exit(main())
"""


def doctor(*argv: str, module: str = "forge_core", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, "doctor", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


def test_a_sound_machine_has_exit_code_0_facts_for_every_check_and_nothing_left_behind(here: Path, capsys) -> None:
    (here / "job.toml").write_text(JOB)
    # By default two ranks must end within a time that a machine with many other tests needs for their start
    code = main(["doctor", "job.toml", "--json", "--time-limit=300"])
    report = json.loads(capsys.readouterr().out)
    bad = [check for check in report["checks"] if check["state"] == "failed"]
    assert (code, bad) == (0, [])
    by_name = {check["name"]: check for check in report["checks"]}
    assert not lacks(by_name["output"]["seen"], "elsewhere", "not there yet")  # of the job, and not made
    for name in ("fsync", "rename", "flock", "mmap", "clock"):
        assert by_name[f"output: {name}"]["state"] in ("ok", "warning")
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_receive"):
        assert "right on 2 ranks" in by_name[f"gloo: {name}"]["seen"]
    assert by_name["cpu: products"]["seen"].startswith("exact")
    assert by_name["job"]["state"] == "ok"
    assert all(check["mend"] for check in report["checks"] if check["state"] == "warning")
    assert {"Python", "torch", "forge-run", "forge-plugin-plan"} <= report["versions"].keys()
    assert [path.name for path in here.iterdir()] == ["job.toml"]


def test_a_collective_with_wrong_results_is_named_with_rank_and_number(here: Path) -> None:
    (here / "broken_network.py").write_text(BROKEN)
    done = doctor(module="broken_network", COLUMNS="300")
    assert done.returncode == 1, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("failed")]
    assert "gloo: all_reduce" in line
    # At position 4321 both ranks have 321, and the second 1000 more.
    assert not lacks(line, "rank 1: 1 of 4,194,304", 1643, 1642)
    assert "1 failed" in done.stdout.splitlines()[-1]


def test_a_torch_that_cannot_be_imported_is_reported_and_what_needs_it_is_not_run(here: Path) -> None:
    (here / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    done = doctor("--json", PYTHONPATH=str(here))
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["torch"]["state"] == "failed"
    assert "libcudart.so.13" in checks["torch"]["seen"]
    assert checks["collectives"]["state"] == checks["devices"]["state"] == "not run"
    assert checks["output: flock"]["state"] == "ok"


def test_help_is_instant_and_ends_with_an_example() -> None:
    code = "import sys; from forge_core.cli import main\ntry: main(['doctor', '--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'rich', 'forge_plugin_plan.doctor.ranks'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "forge-run doctor job.toml --nproc 4" in done.stdout


def test_a_rank_alone_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--nproc=1"])
    assert end.value.code == 2
    assert not lacks(capsys.readouterr().err.splitlines()[-1], "--nproc", 2)


def test_what_is_no_option_and_no_key_of_a_job_is_refused(here: Path, capsys) -> None:
    (here / "job.toml").write_text(JOB)
    for argv, message in {
        ("--nonsense",): "--nonsense: unknown option; keys of the job are written --section.key=value",
        ("--outptu=runs",): "--outptu=runs: unknown option; did you mean '--output'?",
        ("--train.steps=3",): "--train.steps=3: is a key of a job, and there is none to check; name its file too",
        ("job.toml", "--nporc", "4"): "--nporc: unknown option; did you mean '--nproc'?",
    }.items():
        assert main(["doctor", *argv]) == 2
        assert message in capsys.readouterr().err


def test_a_key_may_be_apart_from_its_value(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr("forge_plugin_plan.doctor.command._examine", lambda given, show: seen.append(given) or [])
    main(["doctor", "--output", "runs", "job.toml", "--train.steps", "3", "train.seq_len=8"])
    assert seen[0].overrides == ["--train.steps=3", "--train.seq_len=8"]
    assert seen[0].files == ["job.toml"]
