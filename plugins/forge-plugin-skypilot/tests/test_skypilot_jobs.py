"""Launching, looking at and cancelling managed jobs, with a stand-in for SkyPilot's program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from sky_program import calls, managed_job

from forge_plugin_skypilot.jobs import STATES
from forge_testing.refusals import lacks

CLUSTER = (
    '[cluster]\ntype = "sky"\nnodes = 2\nsecrets = ["WANDB_API_KEY", "HF_TOKEN"]\n[cluster.volumes]\n"/runs" = "team"\n'
)
QUEUE = "jobs queue --all --verbose --output json"


@pytest.fixture(autouse=True)
def cluster_file(submit) -> None:
    Path("sky.toml").write_text(CLUSTER)


def queue(*jobs: dict) -> None:
    Path("queue.json").write_text(json.dumps(jobs))


def test_a_run_is_launched_with_secrets_by_name(submit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    code, out, err = submit()
    assert code == 0, err
    assert not lacks(out, "long: managed job 7 (long), 2 ranks on 2 nodes", "--stop")
    _, launch, _ = calls()
    assert launch.endswith("task.yaml --yes --detach-run --secret WANDB_API_KEY")
    assert yaml.safe_load(Path("launched.yaml").read_text())["secrets"] == {"WANDB_API_KEY": None, "HF_TOKEN": None}
    assert "0123456789abcdef" not in Path("launched.yaml").read_text() + Path("calls").read_text() + out + err


def test_skypilots_own_words_are_passed_on(submit) -> None:
    Path("refuse").touch()
    code, _, err = submit()
    assert code == 2
    assert not lacks(err, "sky jobs failed (1)", "No cloud access")


def test_a_run_that_is_under_way_is_not_launched_twice(submit) -> None:
    queue(managed_job(3, "FAILED"), managed_job(4, "RECOVERING"), managed_job(5, "RUNNING", name="other"))
    code, _, err = submit()
    assert code == 2
    assert not lacks(err, "job.name", "managed job 4", "RECOVERING")
    assert calls() == [QUEUE]
    queue(managed_job(3, "FAILED"))
    assert submit()[0] == 0


def test_without_skypilot_the_error_has_the_line_that_installs_it(submit) -> None:
    (Path("bin") / "sky").unlink()
    code, _, err = submit()
    assert code == 2
    assert not lacks(err, "sky is not on the PATH", "uv tool install skypilot")
    assert submit("--print")[0] == 0


@pytest.mark.parametrize(
    ("status", "state"),
    [
        *(("PENDING", "queued"), ("STARTING", "starting"), ("RUNNING", "running"), ("RECOVERING", "recovering")),
        *(("SUCCEEDED", "finished"), ("FAILED_SETUP", "failed"), ("CANCELLED", "stopped"), ("LATER", "unknown")),
    ],
)
def test_a_status_has_a_state_and_skypilots_words(submit, status: str, state: str) -> None:
    queue(
        managed_job(3, "FAILED"),
        managed_job(9, status, recovery_count=2, infra="AWS (us-east-1)", failure_reason="why"),
    )
    code, out, _ = submit("--status", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["job"], found["state"], found["words"]) == ("9", state, status)
    assert (found["recoveries"], found["where"], found["cause"]) == (2, "AWS (us-east-1)", "why")


def test_logs_and_stop_go_to_the_newest_job_of_the_name(submit) -> None:
    queue(managed_job(3, "FAILED"), managed_job(9, "RUNNING"), managed_job(10, "RUNNING", name="other"))
    assert submit("--logs")[0] == 0
    assert submit("--logs", "--follow")[0] == 0
    code, out, _ = submit("--stop")
    assert code == 0
    assert "managed job 9" in out
    asked = [call for call in calls() if call != QUEUE]
    assert asked == ["jobs logs 9 --no-follow --tail 0", "jobs logs 9 --follow", "jobs cancel 9 --graceful --yes"]


def test_a_run_that_is_not_there_or_has_ended_is_an_error(submit) -> None:
    for option in ("--status", "--logs", "--stop"):
        code, _, err = submit(option)
        assert code == 2
        assert not lacks(err, "no managed job long")
    queue(managed_job(3, "SUCCEEDED"))
    code, _, err = submit("--stop")
    assert code == 2
    assert not lacks(err, "managed job 3", "SUCCEEDED")


def test_every_status_of_skypilot_has_a_state() -> None:
    assert set(STATES.values()) == {"queued", "starting", "running", "recovering", "finished", "failed", "stopped"}
