"""Applying, looking at and stopping runs, with a stand-in for dstack's program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from dstack_program import calls, dstack_run

from forge_plugin_dstack.runs import state_of
from forge_testing.refusals import lacks

CLUSTER = '[cluster]\ntype = "dstack"\nnodes = 2\nenv = ["WANDB_API_KEY"]\nvolumes = ["/mnt/nfs:/runs"]\n'
PS = "ps --all --json"


@pytest.fixture(autouse=True)
def cluster_file(submit) -> None:
    Path("dstack.toml").write_text(CLUSTER)


def test_a_run_is_applied_with_secrets_by_name(submit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    code, out, err = submit()
    assert code == 0, err
    assert not lacks(out, "long: run long of project main, 2 ranks on 2 nodes", "--stop")
    assert calls() == [PS, "apply --file - --yes --detach", PS]
    assert yaml.safe_load(Path("applied.yaml").read_text())["env"] == ["WANDB_API_KEY"]
    assert "0123456789abcdef" not in Path("applied.yaml").read_text() + out + err


def test_dstacks_own_words_are_passed_on(submit) -> None:
    Path("refuse").touch()
    code, _, err = submit()
    assert code == 2
    assert not lacks(err, "dstack apply failed (1)", "No fleets")


def test_a_run_that_is_under_way_is_not_replaced_and_one_that_ended_is(submit) -> None:
    Path("runs.json").write_text(json.dumps({"runs": [dstack_run("running")]}))
    code, _, err = submit()
    assert code == 2
    assert not lacks(err, "job.name", "run long is running")
    assert calls() == [PS]
    Path("runs.json").write_text(json.dumps({"runs": [dstack_run("failed")]}))
    assert submit()[0] == 0


def test_an_apply_that_made_no_run_is_an_error(submit) -> None:
    Path("after.json").write_text(json.dumps({"runs": []}))
    code, _, err = submit()
    assert code == 2
    assert not lacks(err, "no new run long")


STATES = {
    "it waits": (dstack_run("submitted", None), "queued"),
    "it is given nodes": (dstack_run("provisioning", None), "starting"),
    "it waits after an interruption": (dstack_run("pending", None, None), "recovering"),
    "it runs": (dstack_run("running", None, None), "running"),
    "it has finished": (dstack_run("done", 0), "finished"),
    "it has finished after it had saved": (dstack_run("done", 75, 0), "finished"),
    "it has finished after an interruption": (dstack_run("done", 1, None, 0), "finished"),
    "it is not started again after wrong losses": (dstack_run("done", 76, 0), "failed"),
    "it is not started again after a wrong job": (dstack_run("done", 75, 2, 0), "failed"),
    "it may have been given up": (dstack_run("done", 1, 0), "unknown"),
    "it has failed": (dstack_run("failed", 1), "failed"),
    "it is being stopped": (dstack_run("terminating", None, termination_reason="stopped_by_user"), "stopped"),
    "it was stopped": (dstack_run("terminated", 75, termination_reason="aborted_by_user"), "stopped"),
    "the server ended it": (dstack_run("terminated", 1, termination_reason="server_error"), "failed"),
    "a later dstack has other words": (dstack_run("sleeping", 1), "unknown"),
}


@pytest.mark.parametrize(("made", "state"), STATES.values(), ids=STATES.keys())
def test_a_run_has_a_state(made: dict, state: str) -> None:
    assert state_of(made) == state


def test_a_status_has_dstacks_words_and_facts(submit) -> None:
    Path("run.json").write_text(json.dumps(dstack_run("terminated", 1, 75, termination_reason="stopped_by_user")))
    code, out, _ = submit("--status", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["job"], found["state"], found["words"]) == ("long", "stopped", "terminated stopped_by_user")
    assert (found["attempts"], found["cost"]) == (2, 1.23)


def test_logs_and_stop_name_the_run(submit) -> None:
    Path("run.json").write_text(json.dumps(dstack_run("running", None)))
    for words in (["--logs"], ["--logs", "--follow"], ["--stop"]):
        assert submit(*words)[0] == 0
    asked = [call for call in calls() if not call.startswith("run get")]
    assert asked == ["logs long", "attach long --logs", "stop long --yes"]


def test_a_run_that_is_not_there_or_has_ended_is_an_error(submit) -> None:
    for option in ("--status", "--stop"):
        code, _, err = submit(option)
        assert code == 2
        assert not lacks(err, "Run long not found")
    Path("run.json").write_text(json.dumps(dstack_run("done", 0)))
    code, _, err = submit("--stop")
    assert code == 2
    assert not lacks(err, "has ended", "done")
