"""The real kubectl takes our commands and documents: it finds kinds, asks for strict fields, and prints JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from kubernetes_api import serving

from forge_core.cli import main
from forge_testing.refusals import lacks
from forge_testing.tiny import TINY_JOB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl on this machine"),
]
CLUSTER = """
[cluster]
type = "kubeflow"
image = "forge"
context = "here"
namespace = "team-a"
volumes = { runs = "/mnt/runs" }
"""


def test_a_run_is_made_seen_stopped_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Caches of discovery lie below HOME
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    Path("job.toml").write_text(TINY_JOB + '[job]\nname = "long"\noutput = "/mnt/runs"\n')
    Path("kubeflow.toml").write_text(CLUSTER)
    submit = ["submit", "job.toml", "--on=kubeflow.toml"]
    with serving(tmp_path / "kubeconfig") as server:
        assert main(submit) == 0, capfd.readouterr().err
        assert {kind for kind, _ in server.objects} == {"configmaps", "trainingruntimes", "trainjobs"}
        made = [line for line in server.asked if line.startswith("POST")]
        assert all("/namespaces/team-a/" in line and "fieldValidation=Strict" in line for line in made)
        server.objects["trainjobs", "long"]["status"] = {"jobsStatus": [{"name": "node", "ready": 1}]}
        capfd.readouterr()
        assert main([*submit, "--status", "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["state"] == "running"
        assert main(submit) == 2
        assert not lacks(capfd.readouterr().err, "job.name", "running")
        assert main([*submit, "--stop"]) == 0
        assert {kind for kind, _ in server.objects} == {"configmaps", "trainingruntimes"}
        assert main(submit) == 0, capfd.readouterr().err
