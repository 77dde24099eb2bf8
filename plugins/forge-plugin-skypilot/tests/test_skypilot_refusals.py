"""Wrong cluster files and jobs that SkyPilot would not suit: refused with key and line, before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
from sky_program import calls

from forge_testing.refusals import lacks

BASE = """[cluster]
type = "sky"
accelerators = "H100:4"

[cluster.volumes]
"/runs" = "team-runs"
"""
TOKEN = "hf_" + "Ab3" * 10
WRONG = {
    "a misspelt key": ('accelerator = "H100:4"', ["sky.toml:3", "cluster.accelerator", "'accelerators'"]),
    "another type": ('use_spot = "yes"', ["sky.toml:3", "cluster.use_spot", "yes"]),
    "accelerators without a number": ('accelerators = "H100:"', ["sky.toml:3", "cluster.accelerators", "'H100:8'"]),
    "accelerators as a count": ('accelerators = "8xH100"', ["sky.toml:3", "cluster.accelerators", "8xH100"]),
    "a part of an accelerator": ('accelerators = "H100:0.5"', ["sky.toml:3", "cluster.accelerators", "H100:0.5"]),
    "accelerators of two numbers": (
        'accelerators = ["H100:8", "A100:4"]',
        ["sky.toml:3", "cluster.accelerators", "ranks"],
    ),
    "two numbers of GPUs": (
        'accelerators = "H100:4"\ngpus_per_node = 8',
        ["sky.toml:4", "cluster.gpus_per_node", "H100:4"],
    ),
    "GPUs without a name": ("gpus_per_node = 8", ["sky.toml:3", "cluster.gpus_per_node", "cluster.accelerators"]),
    "a cloud that there is none": ('infra = "amazon/us-east-1"', ["sky.toml:3", "cluster.infra", "aws", "amazon"]),
    "a recovery that does not continue": (
        "use_spot = true\njob_recovery = { recover_on_exit_codes = [33] }",
        ["sky.toml:4", "cluster.job_recovery", "75"],
    ),
    "a misspelt recovery": (
        "job_recovery = { max_restarts = 3 }",
        ["sky.toml:3", "cluster.job_recovery", "max_restarts"],
    ),
    "a secret's value": (f'envs = {{ HF = "{TOKEN}" }}', ["sky.toml:3", "cluster.envs", 'secrets = ["HF"]']),
    "a secret by its name": ('envs = { WANDB_API_KEY = "x1" }', ["sky.toml:3", "cluster.envs", "WANDB_API_KEY"]),
    "a secret in a list of names": (f'secrets = ["{TOKEN}"]', ["sky.toml:3", "cluster.secrets", "names"]),
    "a secret in the setup": (
        f'setup = ["huggingface-cli login --token {TOKEN}"]',
        ["sky.toml:3", "cluster.setup", "[0]"],
    ),
    "a variable of SkyPilot": (
        'envs = { SKYPILOT_NODE_RANK = "0" }',
        ["sky.toml:3", "cluster.envs", "SKYPILOT_NODE_RANK"],
    ),
    "a mode that there is none": (
        'file_mounts = { "/data" = { source = "s3://data", mode = "RW" } }',
        ["sky.toml:3", "cluster.file_mounts", "RW"],
    ),
    "a bucket without a name": (
        'file_mounts = { "/data" = { mode = "MOUNT" } }',
        ["sky.toml:3", "cluster.file_mounts", "/data", "source"],
    ),
    "a relative mount": (
        'file_mounts = { data = "s3://data" }',
        ["sky.toml:3", "cluster.file_mounts", "'data'", "absolute"],
    ),
    "a further key that there is none": ("extra.resources.disk_sise = 5", ["sky.toml:3", "cluster.extra", "disk_sise"]),
    "a further key of another type": (
        'extra.resources.disk_size = "big"',
        ["sky.toml:3", "cluster.extra", "disk_size"],
    ),
    "a further key of ours": ('extra.run = "true"', ["sky.toml:3", "cluster.extra", "run", "submit"]),
    "a further key with its own name": ("extra.num_nodes = 2", ["sky.toml:3", "cluster.extra", "nodes"]),
    "a secret in a further key": (
        f'extra.resources.labels.team = "{TOKEN}"',
        ["sky.toml:3", "cluster.extra", "resources.labels.team"],
    ),
}


@pytest.mark.parametrize(("line", "words"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_cluster_file_is_refused_with_key_and_line(submit, line: str, words: list[str]) -> None:
    kept = (
        BASE
        if line.startswith(("use_spot", "infra", "envs", "secrets"))
        else BASE.replace('accelerators = "H100:4"\n', "")
    )
    Path("sky.toml").write_text(kept.replace('type = "sky"\n', f'type = "sky"\n{line}\n'))
    code, out, err = submit()
    assert code == 2
    assert not lacks(err, *words)
    assert TOKEN not in out + err
    assert calls() == []


BUCKET = '[cluster]\ntype = "sky"\n[cluster.file_mounts]\n"/runs" = { source = "s3://b", mode = "MODE" }\n'
UNFIT = {
    "no storage": ('[cluster]\ntype = "sky"\n', [], ["job.output", "/runs", "lost", "cluster.volumes"]),
    "other storage": (BASE, ["--job.output=/tmp/runs"], ["job.output", "'/tmp/runs'", "below /runs"]),
    "relative to a node's own disk": (BASE, ["--job.output=runs"], ["job.output", "'runs'"]),
    "a copy": (BUCKET.replace("MODE", "COPY"), [], ["job.output", "copy"]),
    "a bucket that is not appended to": (BUCKET.replace("MODE", "MOUNT"), [], ["job.output", "MOUNT_CACHED"]),
    "a cache on each node": (
        BUCKET.replace("MODE", "MOUNT_CACHED"),
        ["--nodes=2"],
        ["checkpoint.storage", "2 nodes", '"objects"'],
    ),
    "nothing saved before the instance goes": (
        BASE.replace("[cluster.v", "use_spot = true\n[cluster.v"),
        ["--checkpoint.interval=0", "--checkpoint.interval_minutes=0"],
        ["checkpoint.interval", "spot"],
    ),
    "ranks that the batch does not suit": (BASE, ["--nodes=3"], ["train.global_batch_size"]),
    "a token on the command line": (BASE, [f"--loggers.x={TOKEN}"], ["loggers"]),
}


@pytest.mark.parametrize(("cluster", "options", "words"), UNFIT.values(), ids=UNFIT.keys())
def test_a_job_that_would_lose_its_checkpoints_is_refused(
    submit, cluster: str, options: list[str], words: list[str]
) -> None:
    Path("sky.toml").write_text(cluster)
    code, _, err = submit(*options)
    assert code == 2
    assert not lacks(err, *words)
    assert calls() == []


def test_a_job_file_outside_of_the_copy_and_one_with_a_token_are_refused(submit) -> None:
    Path("sky.toml").write_text(BASE)
    here = Path.cwd()
    Path("token.toml").write_text(f"# {TOKEN}\n[job]\nseed = 1\n")
    for words, expected in {
        (str(here / "job.toml"),): [f"{here}/job.toml", "relative"],
        ("token.toml",): ["token.toml:1", "hf_Ab3…"],
    }.items():
        code, out, err = submit(*words)
        assert code == 2
        assert not lacks(err, *expected)
        assert TOKEN not in out + err
    Path("sky.toml").write_text(BASE.replace('type = "sky"', 'type = "sky"\nworkdir = "code"'))
    code, _, err = submit()
    assert code == 2
    assert not lacks(err, f"{here}/code", "working directory")
    assert calls() == []


def test_data_of_this_machine_are_refused_unless_nodes_have_them(submit, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words\n" * 100)
    text = f'[[data.sources]]\ntype = "text"\npath = "{tmp_path}/text.txt"\n[data.tokenizer]\ntype = "bytes"\n'
    Path("data.toml").write_text(text)
    Path("sky.toml").write_text(BASE)
    code, _, err = submit("data.toml")
    assert code == 2
    assert not lacks(err, "data.sources.0.path", str(tmp_path), "this machine")
    Path("data.toml").write_text(text.replace(f"{tmp_path}/", ""))
    assert submit("data.toml", "--print")[0] == 0


def test_data_in_volumes_and_buckets_need_not_be_here(submit) -> None:
    layer = '[data]\ntokenizer = { type = "bytes" }\nsources = [{ type = "text", path = "/data/web" }]\n'
    Path("data.toml").write_text(layer)
    Path("sky.toml").write_text('[cluster]\ntype = "sky"\nvolumes = { "/runs" = "runs" }\n')
    code, _, err = submit("data.toml", "--print")
    assert code == 2
    assert "data.sources.0.path" in err
    for more in ("volumes={'/runs'='runs', '/data'='corpus'}", "file_mounts={'/data'='s3://corpus'}"):
        code, _, err = submit("data.toml", "--print", f"--cluster.{more}")
        assert (code, "the nodes check it: /data/web" in err) == (0, True), err
