"""What a TrainJob runs in its pods, on two nodes of this machine: evicted in the middle, continued to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from forge_core.cli import main
from forge_testing.nodes import SLOW_HOOK, SLOW_JOB, Nodes, digest_of

JOB = SLOW_JOB.replace('name = "NAME"', 'name = "NAME"\noutput = "FOLDER/mnt"')
CLUSTER = '[cluster]\ntype = "kubeflow"\nnodes = 2\nimage = "forge"\nvolumes = { runs = "FOLDER/mnt" }\n'
# As Trainer's torch policy sets them; the master is the first pod there
PODS = [{"PET_NODE_RANK": str(number), "PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1"} for number in range(2)]
Documents = dict[str, dict[str, Any]]


def rendered(name: str, job: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, Documents]:
    """The script of the pods of a run, whose ConfigMap is in a folder of this machine, and all documents."""
    (folder / "job.toml").write_text(job.replace("NAME", name).replace("FOLDER", str(folder)))
    assert main(["submit", "job.toml", "--on=kubeflow.toml", "--print"]) == 0, capsys.readouterr().err
    documents = {document["kind"]: document for document in yaml.safe_load_all(capsys.readouterr().out)}
    mount = folder / name
    mount.mkdir()
    for key, text in documents["ConfigMap"]["data"].items():
        (mount / key).write_text(text)
    script: str = documents["TrainJob"]["spec"]["trainer"]["command"][2]
    return script.replace("/forge-run/job", str(mount)), documents


def actions(documents: Documents, codes: list[int]) -> list[str]:
    """What the Job does with pods of these exit codes, by its failure policy: the first rule that fits."""
    [job] = documents["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"] for rule in reversed(rules) for code in rule.get("onExitCodes", {}).get("values", [])
    }
    return [by_code.get(code, "Count") for code in codes]


@pytest.mark.thorough
def test_a_run_that_is_evicted_continues_to_the_bit_and_a_wrong_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnt").mkdir()
    Path("slow.py").write_text(SLOW_HOOK)
    Path("kubeflow.toml").write_text(CLUSTER.replace("FOLDER", str(tmp_path)))
    script, _ = rendered("whole", JOB, tmp_path, capsys)
    with Nodes(script, PODS, tmp_path) as nodes:
        assert nodes.wait() == [0, 0]
    script, documents = rendered("evicted", JOB, tmp_path, capsys)
    with Nodes(script, PODS, tmp_path) as nodes:
        nodes.wait_for_step(tmp_path / "mnt/evicted", 15)
        # A single node: the whole run saves, and both pods are replaced
        nodes.processes[1].terminate()
        codes = nodes.wait()
    assert (codes, actions(documents, codes)) == ([75, 75], ["Ignore", "Ignore"])
    with Nodes(script, PODS, tmp_path) as nodes:
        assert nodes.wait() == [0, 0]
    assert digest_of(tmp_path / "mnt/evicted", 40) == digest_of(tmp_path / "mnt/whole", 40)
    (tmp_path / "evicted/job.toml").write_text("[train]\nsteps = 0\n")
    with Nodes(script, PODS, tmp_path) as nodes:
        codes = nodes.wait()
    assert (codes, actions(documents, codes)) == ([2, 2], ["FailJob", "FailJob"])
