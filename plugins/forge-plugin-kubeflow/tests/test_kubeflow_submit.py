"""`forge-run submit --on kubeflow.toml` with a stand-in for kubectl: what is made, seen and deleted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge_core.cli import main
from forge_testing.refusals import lacks
from forge_testing.tiny import TINY_JOB

JOB = TINY_JOB + '[job]\nname = "long"\noutput = "/mnt/runs"\n'
CLUSTER = """
[cluster]
type = "kubeflow"
image = "forge"
context = "gke"
namespace = "team-a"
volumes = { runs = "/mnt/runs" }
"""
Run = Callable[..., tuple[int, str, str]]
Objects = dict[str, dict[str, Any]]
STORE = Path("objects.json")


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`forge-run submit … --on kubeflow.toml` with a kubectl that keeps its objects in a file."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "kubeflow.toml").write_text(CLUSTER)
    (tmp_path / "bin").mkdir()
    stand_in = Path(__file__).with_name("kubectl_stand_in.py")
    (tmp_path / "bin/kubectl").write_text(
        # -S: without site-packages, whose editable installs take longer than the program
        f'#!/bin/bash\nPYTHONPATH={Path(yaml.__file__).parents[1]} exec {sys.executable} -S {stand_in} "$@"\n'
    )
    (tmp_path / "bin/kubectl").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["submit", "job.toml", *words, "--on=kubeflow.toml"])
        sys.stdout.flush()
        return (code, *capfd.readouterr())

    return run


def objects() -> Objects:
    found: Objects = json.loads(STORE.read_text())
    return found


def put(**changes: Any) -> None:
    """Change the status of the TrainJob, or add objects by `kind_name`."""
    store = objects()
    if "status" in changes:
        store["trainjob/long"]["status"] = changes.pop("status")
    store.update({key.replace("_", "/"): value for key, value in changes.items()})
    STORE.write_text(json.dumps(store))


def pod(phase: str, code: int | None = None) -> dict[str, Any]:
    ended = [] if code is None else [{"state": {"terminated": {"exitCode": code}}}]
    labels = {"jobset.sigs.k8s.io/jobset-name": "long"}
    return {
        "kind": "Pod",
        "metadata": {"name": "long-node-0-0-x7k2p", "labels": labels},
        "spec": {"nodeName": "gpu-17"},
        "status": {"phase": phase, "containerStatuses": ended},
    }


def test_a_run_is_made_seen_read_and_stopped_and_then_continued(submit: Run) -> None:
    code, out, err = submit()
    assert code == 0, err
    assert not lacks(out, "long: TrainJob long in team-a", "1 rank on 1 node", "--status")
    assert set(objects()) == {"configmap/long", "trainingruntime/long", "trainjob/long"}
    for call in Path("calls.txt").read_text().splitlines():
        assert not lacks(call, "--context=gke", "--namespace=team-a")
    # Under way: not a second time
    put(status={"jobsStatus": [{"name": "node", "ready": 1}]}, pod_a=pod("Running"))
    code, _, err = submit()
    assert (code, lacks(err, "job.name", "long is on the cluster already: running")) == (2, [])
    code, out, _ = submit("--status", "--json")
    assert json.loads(out) == {
        "run": "long",
        "job": "long",
        "state": "running",
        "words": "all pods are ready",
        "restarts": 0,
        "pods": [{"pod": "long-node-0-0-x7k2p", "node": "gpu-17", "phase": "Running", "exit_code": None}],
    }
    code, out, _ = submit("--logs", "--follow")
    assert (code, lacks(out, "--selector=jobset.sigs.k8s.io/jobset-name=long", "--container=node", "--follow")) == (
        0,
        [],
    )
    code, out, _ = submit("--stop")
    assert (code, lacks(out, "TrainJob long is deleted")) == (0, [])
    # Its pods still save: a new run would meet them
    assert json.loads(submit("--status", "--json")[1])["state"] == "running"
    code, _, err = submit()
    assert (code, lacks(err, "1 pods save and end")) == (2, [])
    put(pod_a=pod("Succeeded", 75))
    assert json.loads(submit("--status", "--json")[1])["state"] == "stopped"
    assert submit("--train.steps=4")[0] == 0
    assert "--train.steps=4" in objects()["trainjob/long"]["spec"]["trainer"]["command"][2]


STATES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "Kueue has not admitted it": ({"conditions": [{"type": "Suspended", "status": "True"}]}, {}, "queued", "Suspended"),
    "pods are pulled": ({}, {"pod_a": pod("Pending")}, "starting", "1 pods, not all of them ready"),
    "a Job has failed": (
        {"jobsStatus": [{"name": "node", "ready": 0, "failed": 1}]},
        {},
        "recovering",
        "0 pods, not all of them ready",
    ),
    "between attempts": (
        {"jobsStatus": [{"name": "node", "ready": 0, "failed": 0}]},
        {"jobset_long": {"kind": "JobSet", "status": {"restarts": 2}}},
        "recovering",
        "0 pods, not all of them ready",
    ),
    "finished": (
        {"conditions": [{"type": "Suspended", "status": "False"}, {"type": "Complete", "status": "True"}]},
        {"pod_a": pod("Succeeded", 0)},
        "finished",
        "Complete",
    ),
    "a wrong job": (
        {"conditions": [{"type": "Failed", "status": "True", "reason": "FailJobSet", "message": "exit code 2"}]},
        {"pod_a": pod("Failed", 2)},
        "failed",
        "FailJobSet: exit code 2",
    ),
}


@pytest.mark.parametrize(("status", "further", "state", "words"), STATES.values(), ids=STATES)
def test_states_are_those_of_every_cluster(
    submit: Run, status: dict[str, Any], further: dict[str, Any], state: str, words: str
) -> None:
    assert submit()[0] == 0
    put(status=status, **further)
    found = json.loads(submit("--status", "--json")[1])
    assert (found["state"], found["words"]) == (state, words)
    if state in ("finished", "failed"):
        assert submit()[0] == 0


def test_a_refusal_of_the_cluster_leaves_nothing(submit: Run) -> None:
    refusal = 'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request'
    Path("refuse.txt").write_text(refusal)
    code, _, err = submit()
    assert (code, lacks(err, "Kubernetes took nothing", refusal)) == (2, [])
    assert objects() == {}


@pytest.mark.parametrize(
    ("labels", "folder", "facts"),
    [
        ({}, "/mnt/runs/long", ["ConfigMap long", "did not make"]),
        ({"app.kubernetes.io/managed-by": "forge-run"}, "/mnt/other/long", ["ConfigMap long", "/mnt/other/long"]),
    ],
)
def test_objects_of_others_stay(submit: Run, labels: dict[str, str], folder: str, facts: list[str]) -> None:
    metadata = {"name": "long", "labels": labels, "annotations": {"forge-run.dev/run-folder": folder}}
    STORE.write_text(json.dumps({"configmap/long": {"kind": "ConfigMap", "metadata": metadata}}))
    code, _, err = submit()
    assert (code, lacks(err, "job.name", *facts)) == (2, []), err
    assert objects()["configmap/long"]["metadata"] == metadata


def test_what_was_not_submitted_has_no_status(submit: Run) -> None:
    for option in ("--status", "--stop"):
        code, _, err = submit(option)
        assert (code, lacks(err, "long", "TrainJob long")) == (2, []), err
    Path("bin/kubectl").unlink()
    code, _, err = submit("--status")
    assert (code, lacks(err, "kubectl", "PATH")) == (2, [])


GOES_BY_CODES = {
    "failurePolicy": {"maxRestarts": 1},
    "replicatedJobs": [{"name": "node", "template": {"spec": {"podFailurePolicy": {"rules": []}}}}],
}
STOCK = {"replicatedJobs": [{"name": "node", "template": {"spec": {}}}]}


@pytest.mark.parametrize(
    ("spec", "code", "facts"),
    [
        (None, 2, ["cluster.runtime", "'torch'"]),
        ({"mlPolicy": {"mpi": {}}, "template": {"spec": STOCK}}, 2, ["cluster.runtime", "'torch'", "mlPolicy.torch"]),
        ({"mlPolicy": {"torch": {}}, "template": {"spec": STOCK}}, 0, ["torch does not follow exit codes"]),
        ({"mlPolicy": {"torch": {}}, "template": {"spec": GOES_BY_CODES}}, 0, ["TrainJob long"]),
    ],
)
def test_a_runtime_of_the_cluster_is_looked_at(submit: Run, spec: Any, code: int, facts: list[str]) -> None:
    if spec is not None:
        STORE.write_text(json.dumps({"clustertrainingruntime/torch": {"kind": "ClusterTrainingRuntime", "spec": spec}}))
    found, out, err = submit("--cluster.runtime=torch")
    assert (found, lacks(out + err, *facts)) == (code, []), err
    assert ("trainjob/long" in objects()) == (code == 0)
    assert ("does not follow exit codes" in out) == (
        spec is not None and spec["template"]["spec"] is STOCK and code == 0
    )
