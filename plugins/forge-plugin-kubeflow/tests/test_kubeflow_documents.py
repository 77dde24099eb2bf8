"""`forge-run submit --on kubeflow.toml --print`: what Kubernetes would get, and what is refused before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models

from forge_core.cli import main
from forge_plugin_kubeflow.names import object_name
from forge_testing.refusals import lacks
from forge_testing.tiny import TINY_JOB

JOB = (
    TINY_JOB.replace("global_batch_size = 4", "global_batch_size = 16") + '[job]\nname = "long"\noutput = "/mnt/runs"\n'
)
CLUSTER = """
[cluster]
type = "kubeflow"
nodes = 2
gpus_per_node = 4
image = "ghcr.io/team/forge:1.2"
namespace = "team-a"
queue = "gpus"
priority = "high"
max_restarts = 3
service_account = "trainer"
image_pull_secrets = ["ghcr"]
setup = ["ulimit -l unlimited"]
resources = { cpu = 16, memory = "128Gi", "rdma/hca" = 4 }
volumes = { runs = "/mnt/runs", data = "/mnt/data" }
env = { NCCL_DEBUG = "WARN", TOKENIZERS_PARALLELISM = "false" }
secrets = { WANDB_API_KEY = "wandb/api-key" }
node_selector = { "cloud.google.com/gke-accelerator" = "nvidia-h100-80gb" }
[cluster.extra]
activeDeadlineSeconds = 86400
"""
GOLDEN = Path(__file__).parent / "kubeflow.yaml"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`forge-run submit … --on kubeflow.toml` in a folder with both files, and no kubectl on the PATH."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "kubeflow.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["submit", *(words or ("job.toml", "--print")), "--on=kubeflow.toml"])
        return (code, *capsys.readouterr())

    return run


def printed(submit: Run, *words: str) -> dict[str, Any]:
    """The documents of `--print`, by their kinds."""
    code, text, err = submit("job.toml", "--print", *words)
    assert code == 0, err
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_what_is_printed_is_known_to_kubeflows_classes(submit: Run) -> None:
    documents = printed(submit)
    # Not from here: a change of ours has to be seen in the file
    golden = {document["kind"]: document for document in yaml.safe_load_all(GOLDEN.read_text())}
    assert {kind: document for kind, document in documents.items() if kind != "ConfigMap"} == golden
    job, runtime = documents["TrainJob"], documents["TrainingRuntime"]
    assert models.TrainerV1alpha1TrainJob.from_dict(job).spec.trainer.num_nodes == 2
    read = models.TrainerV1alpha1TrainingRuntime.from_dict(runtime)
    [node] = read.spec.template.spec.replicated_jobs
    codes = {rule.action: rule.on_exit_codes for rule in node.template.spec.pod_failure_policy.rules[:2]}
    assert (codes["FailJob"].values, codes["Ignore"].values) == ([2, 76], [75])
    assert documents["ConfigMap"]["data"] == {"job.toml": JOB}


NODE = """
import json, os, sys
words = [*sys.argv[1:], os.getcwd()]
open(os.environ["OUT"], "w").write(json.dumps(words))
"""


def test_every_node_runs_the_command_with_its_own_number(submit: Run, tmp_path: Path) -> None:
    """The container's command in bash, with the variables of Trainer's torch policy and Kubernetes' own expansion."""
    odd = '--loggers.jsonl.file="$(HOME)$$.jsonl"'
    documents = printed(submit, odd)
    job = documents["TrainJob"]
    bash, flag, script = job["spec"]["trainer"]["command"]
    assert (bash, flag) == ("bash", "-c")
    folder = tmp_path / "mount"
    folder.mkdir()
    # As Kubernetes does: `$$` is `$`, and `$(NAME)` would be replaced
    assert "$(HOME)" not in script.replace("$$", "")
    script = script.replace("$$", "$").replace("/forge-run/job", str(folder)).replace("ulimit -l", "ulimit -c")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "forge-run").write_text(f"#!{sys.executable} -S{NODE}")
    (programs / "forge-run").chmod(0o755)
    for node in "01":
        environment = {
            "PET_NODE_RANK": node,
            "PET_MASTER_ADDR": "long-node-0-0.long",
            "OUT": str(tmp_path / f"{node}.json"),
        }
        environment |= {"PATH": f"{programs}:/usr/bin:/bin"}
        subprocess.run(["/bin/bash", "-c", script], env=environment, check=True)
        words = json.loads((tmp_path / f"{node}.json").read_text())
        assert words == [
            *("launch", "local", "job.toml", odd, "--nproc=4", "--nodes=2"),
            *(f"--node={node}", "--address=long-node-0-0.long", str(folder)),
        ]


def test_a_runtime_of_the_cluster_replaces_ours(submit: Run) -> None:
    documents = printed(submit, "--cluster.runtime=torch-distributed")
    assert set(documents) == {"ConfigMap", "TrainJob"}
    reference = documents["TrainJob"]["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == ("ClusterTrainingRuntime", "torch-distributed")


def test_further_keys_join_those_of_ours_and_replace_none(submit: Run) -> None:
    extra = '--cluster.extra={trainer={env=[{name="A",value="1"}]},runtimePatches=[{manager="a.b/c"}]}'
    spec = printed(submit, extra)["TrainJob"]["spec"]
    assert [variable["name"] for variable in spec["trainer"]["env"]][-2:] == ["WANDB_API_KEY", "A"]
    assert [patch["manager"] for patch in spec["runtimePatches"]] == ["forge-run.dev/submit", "a.b/c"]
    twice = "--cluster.extra={trainer={resourcesPerNode={limits={cpu='1'}}}}"
    code, _, err = submit("job.toml", "--print", twice)
    assert (code, lacks(err, "extra.trainer.resourcesPerNode.limits.cpu")) == (2, [])


@pytest.mark.parametrize(("grace", "seconds"), [("90", 120), ("0.5", 31), ("0", 86400)])
def test_pods_have_the_time_that_ranks_have_to_save(submit: Run, grace: str, seconds: int) -> None:
    patch = printed(submit, f"--launch.grace_s={grace}")["TrainJob"]["spec"]["runtimePatches"][0]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == seconds


def test_local_files_travel_with_the_job(submit: Run, tmp_path: Path) -> None:
    hook = "from forge_core import TrainingHook\nclass Quiet(TrainingHook): pass\n"
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/hook.py").write_text(hook)
    (tmp_path / "parts/long.toml").write_text("[train]\nsteps = 3\n")
    code, text, err = submit("job.toml", "parts/long.toml", "--print", '--hooks.quiet.type="./parts/hook.py:Quiet"')
    assert code == 0, err
    config_map, _, job = yaml.safe_load_all(text)
    pod = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    [items] = [each["configMap"]["items"] for each in _pod(pod)["volumes"] if "configMap" in each]
    files = {item["path"]: config_map["data"][item["key"]] for item in items}
    assert files["parts/hook.py"] == hook
    assert set(files) == {"job.toml", "parts/long.toml", "parts/hook.py"}
    assert "launch local job.toml parts/long.toml " in job["spec"]["trainer"]["command"][2]


def _pod(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return pod


def test_a_job_file_from_elsewhere_gets_its_plain_name(submit: Run, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "cluster.toml").write_text(CLUSTER)
    os.chdir(folder)
    (folder / "kubeflow.toml").write_text(CLUSTER)
    code, text, err = submit(str(tmp_path / "job.toml"), "--print")
    assert code == 0, err
    assert "launch local job.toml --nproc" in text


TOKEN = "hf_" + "aB3dE5gH7jK9" * 3
REFUSED: dict[str, tuple[str, str, list[object]]] = {
    "a misspelt key": ("namespace", "namspace", ["kubeflow.toml:7", "cluster.namspace", "'namespace'"]),
    "another type": ("max_restarts = 3", 'max_restarts = "3"', ["kubeflow.toml:10", "cluster.max_restarts"]),
    "no image": ('image = "ghcr.io/team/forge:1.2"\n', "", ["cluster.image"]),
    "an image with a space": (
        "forge:1.2",
        "forge 1.2",
        ["kubeflow.toml:6", "cluster.image", "'ghcr.io/team/forge 1.2'"],
    ),
    "a namespace that is no name": ('"team-a"', '"Team_A"', ["kubeflow.toml:7", "cluster.namespace", "'Team_A'"]),
    "a queue that is no name": ('"gpus"', '"gpus/all"', ["kubeflow.toml:8", "cluster.queue", "'gpus/all'"]),
    "a priority without a queue": ('queue = "gpus"\n', "", ["cluster.priority", "cluster.queue"]),
    "restarts below 0": ("max_restarts = 3", "max_restarts = -1", ["kubeflow.toml:10", "cluster.max_restarts"]),
    "a quantity that is none": ('"128Gi"', '"128 GB"', ["kubeflow.toml:14", "cluster.resources", "memory", "'128 GB'"]),
    "a negative quantity": ("cpu = 16", "cpu = -16", ["kubeflow.toml:14", "cluster.resources", "cpu", -16]),
    "a resource that is none": ('"rdma/hca"', '"rdma/"', ["kubeflow.toml:14", "cluster.resources", "'rdma/'"]),
    "a claim that is no name": ("{ runs =", "{ Runs =", ["kubeflow.toml:15", "cluster.volumes", "'Runs'"]),
    "a relative mount": ('"/mnt/data"', '"mnt/data"', ["kubeflow.toml:15", "cluster.volumes", "'mnt/data'"]),
    "two claims at one path": ('"/mnt/data"', '"/mnt/runs/"', ["kubeflow.toml:15", "cluster.volumes", "/mnt/runs/"]),
    "a mount over the job's files": (
        '"/mnt/data"',
        '"/forge-run"',
        ["kubeflow.toml:15", "cluster.volumes", "/forge-run/job"],
    ),
    "run folders outside of volumes": ('"/mnt/runs"', '"/mnt/run"', ["job.output", "'/mnt/runs'", "/mnt/run"]),
    "a token by its prefix": (
        '"WARN"',
        f'"{TOKEN}"',
        ["kubeflow.toml:16", "cluster.env", "NCCL_DEBUG", "secrets.NCCL_DEBUG"],
    ),
    "a secret by its name": ("NCCL_DEBUG =", "DB_PASSWORD =", ["kubeflow.toml:16", "cluster.env", "DB_PASSWORD"]),
    "a key by its form": ('"WARN"', f'"{"0a1b" * 10}"', ["kubeflow.toml:16", "cluster.env", "NCCL_DEBUG"]),
    "a variable of Trainer's": ("NCCL_DEBUG =", "PET_NNODES =", ["kubeflow.toml:16", "cluster.env", "PET_NNODES"]),
    "a variable that is no name": (
        "NCCL_DEBUG =",
        '"NCCL-DEBUG" =',
        ["kubeflow.toml:16", "cluster.env", "'NCCL-DEBUG'"],
    ),
    "a secret in place of its name": (
        '"wandb/api-key"',
        f'"{TOKEN}"',
        ["kubeflow.toml:17", "cluster.secrets", "WANDB_API_KEY"],
    ),
    "a label that is none": (
        '"nvidia-h100-80gb"',
        '"H100 80GB"',
        ["kubeflow.toml:18", "cluster.node_selector", "'H100 80GB'"],
    ),
    "a field that TrainJobs lack": (
        "activeDeadlineSeconds",
        "activeDeadline",
        ["kubeflow.toml:19", "cluster.extra", "activeDeadline"],
    ),
    "a field of another type": (
        "= 86400",
        '= "86400"',
        ["kubeflow.toml:19", "cluster.extra", "activeDeadlineSeconds", "'86400'"],
    ),
    "a field of ours": (
        "activeDeadlineSeconds = 86400",
        "trainer.numNodes = 4",
        ["kubeflow.toml:19", "trainer.numNodes", "nodes"],
    ),
    "a secret in a field": (
        "activeDeadlineSeconds = 86400",
        'trainer.env = [{ name = "HF_TOKEN", value = "x" }]',
        ["kubeflow.toml:19", "cluster.extra", "HF_TOKEN", "secrets"],
    ),
}


@pytest.mark.parametrize(("old", "new", "facts"), REFUSED.values(), ids=REFUSED)
def test_what_kubernetes_would_refuse_is_refused_before(submit: Run, old: str, new: str, facts: list[object]) -> None:
    assert old in CLUSTER
    Path("kubeflow.toml").write_text(CLUSTER.replace(old, new))
    code, out, err = submit()
    assert (code, out, lacks(err, *facts)) == (2, "", []), err
    assert TOKEN not in err


def test_the_job_is_checked_with_the_ranks_asked_for(submit: Run) -> None:
    code, _, err = submit("job.toml", "--print", "--nodes=3")
    assert (code, lacks(err, "train.global_batch_size", 12)) == (2, []), err


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("large.toml", "# 1234567\n" * 104_858, ["large.toml", "1,048,576"]),
        ("token.toml", f'[job]\nnotes = "{TOKEN}"\n', ["token.toml:2", "hf_aB3…", "secrets.NAME"]),
    ],
)
def test_files_that_cannot_be_sent_are_named(submit: Run, name: str, text: str, facts: list[object]) -> None:
    Path(name).write_text(text if name == "large.toml" else "# " + text.replace("\n", "\n# ", 1))
    code, out, err = submit("job.toml", name, "--print")
    assert (code, out, lacks(err, *facts)) == (2, "", []), err


def test_data_of_this_machine_are_refused(submit: Run, tmp_path: Path) -> None:
    """In the working directory of the container are job files alone."""
    (tmp_path / "text.txt").write_text("words " * 200)
    source = '--data.sources=[{type="text",path="text.txt"}]'
    code, _, err = submit("job.toml", "--print", source, '--data.tokenizer.type="bytes"')
    assert (code, lacks(err, "data.sources", "text.txt", "mount")) == (2, []), err


def test_a_component_file_outside_of_the_working_directory_is_refused(submit: Run, tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text("from forge_core import TrainingHook\nclass Quiet(TrainingHook): pass\n")
    (tmp_path / "work").mkdir()
    for name in ("job.toml", "kubeflow.toml"):
        (tmp_path / "work" / name).write_text((tmp_path / name).read_text())
    os.chdir(tmp_path / "work")
    code, _, err = submit("job.toml", "--print", '--hooks.quiet.type="../hook.py:Quiet"')
    assert (code, lacks(err, tmp_path / "hook.py", "volume")) == (2, []), err


def test_names_are_those_of_kubernetes_and_differ_where_names_of_runs_do() -> None:
    assert object_name("long-2", 2) == "long-2"
    names = {object_name(name, 1000) for name in ("Long_2", "long.2", "2", "µ", "x" * 80, "x" * 81, "-")}
    assert len(names) == 7
    for name in names:
        # The longest name of a pod is a label of DNS
        assert len(f"{name}-node-0-999-abcde") <= 63
        assert name[0].isalpha()
        assert name.replace("-", "").isalnum()
        assert name == name.lower()


def test_data_and_a_run_folder_in_volumes_need_not_be_here(submit: Run) -> None:
    Path("mount").touch()
    mount = Path.cwd() / "mount"
    Path("volumes.toml").write_text(
        f'[job]\noutput = "{mount}/runs"\n[data.tokenizer]\ntype = "bytes"\n'
        f'[[data.sources]]\ntype = "text"\npath = "{mount}/web"\n'
    )
    code, _, err = submit("job.toml", "volumes.toml", "--print")
    assert code == 2
    assert not lacks(err, "job.output", "data.sources.0.path")
    code, text, err = submit("job.toml", "volumes.toml", "--print", f"--cluster.volumes.runs={mount}")
    assert code == 0, err
    assert f"mountPath: {mount}" in text
    assert err == f"warning: data.sources.0.path: not here, so the nodes check it: {mount}/web\n"
