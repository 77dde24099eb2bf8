"""`forge-run doctor gpus`: a table before a run."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from forge_core.cli import main
from forge_kit.tools.json_output import json_text
from forge_plugin_resilience.health.command import facts_of, report
from forge_plugin_resilience.health.links import Link, Links
from forge_testing.refusals import lacks

HOST = socket.gethostname()


def health(folder, *arguments):
    command = [sys.executable, "-m", "forge_core", "doctor", "gpus", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_ranks_and_links_are_shown_and_the_exit_code_says_whether_all_is_well(tmp_path):
    code, out, err = health(tmp_path, "--nproc", "2")
    lines = out.splitlines()
    assert lines[0].split() == ["rank", "host", "GPU", "matrix", "product", "state"]
    assert [line.split()[:2] for line in lines[1:3]] == [["0", HOST], ["1", HOST]]
    assert f"rank 0 on {HOST} and rank 1 on {HOST}" in out
    if lines[-1] == "all is well":
        assert (code, err) == (0, "")
    else:  # a busy machine may be slow on one rank
        assert code == 1
        assert not lacks(err, "rank 0")


@pytest.mark.slow
def test_a_process_alone_has_no_links(tmp_path):
    code, out, err = health(tmp_path)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "all is well"
    assert "GB/s" not in out


def row(host, matmul_ms=5.0, faults=()):
    return {"host": host, "gpu": ("H100", list(faults)), "matmul_ms": matmul_ms}


def test_what_is_not_well_is_named_with_its_machine():
    rows = [row("gpu01"), row("gpu02", matmul_ms=9.0), row("gpu03", faults=["Xid 79"])]
    links = [Link(ranks=(0, 2), hosts=("gpu01", "gpu03"), gigabytes_per_s=20.0, is_right=False)]
    lines, wrong = report(rows, links, 1.15, Links())
    assert lines[3].split()[-4:] == ["5", "ms", "Xid", "79"]
    assert lines[-1].split()[-1] == "WRONG"
    facts = json.loads(json_text(facts_of(rows, links, wrong)))
    assert facts["links"] == [
        {
            "ranks": [0, 2],
            "hosts": ["gpu01", "gpu03"],
            "gigabytes_per_s": 20.0,
            "is_right": False,
            "within_machine": False,
        }
    ]
    assert (facts["ranks"][2]["faults"], facts["problems"]) == (["Xid 79"], wrong)
    slow, faulty, unequal = wrong
    assert not lacks(slow, "rank 1 on gpu02", "5 ms")
    assert not lacks(faulty, "rank 2 on gpu03", "Xid 79")
    assert not lacks(unequal, "rank 0 on gpu01", "rank 2 on gpu03", "wrong")
    assert report([row("gpu01"), row("gpu02")], [], 1.15, Links())[1] == []


@pytest.mark.parametrize("faults", [["Xid 79"], []])
def test_a_machine_that_is_not_well_has_another_exit_code(monkeypatch, capsys, faults):
    monkeypatch.setattr("forge_plugin_resilience.health.command._gpu", lambda device: ("H100", faults))
    monkeypatch.setattr("forge_plugin_resilience.health.stragglers.matmul_ms", lambda device: 5.0)
    assert main(["doctor", "gpus"]) == (1 if faults else 0)
    out, err = capsys.readouterr()
    assert ("all is well" in out) == (not faults)
    assert not lacks(err, *faults, *[f"rank 0 on {HOST}" for _ in faults])
    assert main(["doctor", "gpus", "--json"]) == (1 if faults else 0)
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks"] == [{"rank": 0, "host": HOST, "gpu": "H100", "matmul_ms": 5.0, "faults": faults}]
    assert facts["links"] == []
    assert facts["problems"] == [f"rank 0 on {HOST}: {fault}" for fault in faults]


def test_a_bad_job_is_refused_before_any_rank_starts(tmp_path):
    (tmp_path / "job.toml").write_text("[train]\nstep = 3\n")
    code, out, err = health(tmp_path, "job.toml", "--nproc", "2")
    assert (code, out) == (2, "")
    assert "unknown key" in err
