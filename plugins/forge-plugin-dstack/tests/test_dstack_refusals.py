"""Wrong cluster files and jobs that dstack would not suit: refused with key and line, before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
from dstack_program import calls

from forge_testing.refusals import lacks

TOKEN = "hf_" + "Ab3" * 10
HEAD = '[cluster]\ntype = "dstack"\n'
WRONG = {
    "a misspelt key": ('backend = ["aws"]', ["cluster.backend", "'backends'"]),
    "another type": ("image = 12", ["cluster.image", "12"]),
    "a cloud that there is none": ('backends = ["amazon"]', ["cluster.backends", "'aws'", "'gcp'"]),
    "a GPU that is written otherwise": ('resources = { gpu = "H100:8:4" }', ["cluster.resources", "count", "H100:8:4"]),
    "a misspelt resource": ("resources = { gppu = 8 }", ["cluster.resources", "gppu"]),
    "an open number of GPUs": ('resources = { gpu = "H100:4..8" }', ["cluster.resources", "H100:4..8", "rank"]),
    "no number of GPUs": ('resources = { gpu = "H100" }', ["cluster.resources", '"H100:8"']),
    "two numbers of GPUs": (
        'gpus_per_node = 4\nresources = { gpu = "H100:8" }',
        ["dstack.toml:4", "cluster.resources", "cluster.gpus_per_node is 4", "H100:8"],
    ),
    "a policy that there is none": ('spot_policy = "cheap"', ["cluster.spot_policy", "on-demand", "cheap"]),
    "spot without a retry": (
        'spot_policy = "spot"\nretry = { on_events = ["no-capacity"] }',
        ["dstack.toml:4", "cluster.retry", "interruption"],
    ),
    "spot that fails when it has saved": (
        'spot_policy = "auto"\nretry = { on_events = ["interruption"] }',
        ["dstack.toml:4", "cluster.retry", "'error'", "75"],
    ),
    "an event that there is none": ('retry = { on_events = ["preempted"] }', ["cluster.retry", "interruption"]),
    "a secret's value": (f'env = ["HF={TOKEN}"]', ["cluster.env", '"HF"', "secrets.NAME"]),
    "a secret by its name": ('env = ["WANDB_API_KEY=x1"]', ["cluster.env", "WANDB_API_KEY"]),
    "a secret in place of a name": (f'env = ["{TOKEN}"]', ["cluster.env", "names"]),
    "a secret in the setup": (f'setup = ["login {TOKEN}"]', ["cluster.setup"]),
    "a variable of dstack": ('env = ["DSTACK_NODE_RANK=0"]', ["cluster.env", "DSTACK_NODE_RANK"]),
    "a volume without a path": ('volumes = ["runs"]', ["cluster.volumes", "runs"]),
    "a relative volume": ('volumes = ["runs:data"]', ["cluster.volumes", "absolute"]),
    "a relative working directory": ('working_dir = "work"', ["cluster.working_dir", "absolute"]),
    "files that are no pair": ('files = ["a:b:c"]', ["cluster.files", "a:b:c"]),
    "a further key that there is none": ("extra.idle = 5", ["cluster.extra", "idle"]),
    "a further key of another type": ('extra.max_duration = "long"', ["cluster.extra", "max_duration"]),
    "a further key of ours": ('extra.commands = ["true"]', ["cluster.extra", "commands", "submit"]),
    "a further key with its own name": ("extra.nodes = 2", ["cluster.extra", "the key nodes"]),
    "a secret in a further key": (f'extra.tags = {{ t = "{TOKEN}" }}', ["cluster.extra", "tags.t"]),
}


@pytest.mark.parametrize(("line", "words"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_cluster_file_is_refused_with_key_and_line(submit, line: str, words: list[str]) -> None:
    kept = "" if line.startswith("volumes") else 'volumes = ["/mnt/nfs:/runs"]\n'
    Path("dstack.toml").write_text(f"{HEAD}{line}\n{kept}")
    code, out, err = submit()
    assert code == 2
    assert not lacks(err, "dstack.toml:3" if not words[0].startswith("dstack") else words[0], *words)
    assert TOKEN not in out + err
    assert calls() == []


UNFIT = {
    "no storage": (HEAD, [], ["job.output", "lost", "cluster.volumes"]),
    "other storage": (f'{HEAD}volumes = ["v:/data"]', [], ["job.output", "'/runs'", "below /data"]),
    "a volume of one node": (f'{HEAD}nodes = 2\nvolumes = ["v:/runs"]', [], ["job.output", "2 nodes", '"objects"']),
    "nothing saved before the instance goes": (
        f'{HEAD}spot_policy = "spot"\nvolumes = ["v:/runs"]',
        ["--checkpoint.interval=0", "--checkpoint.interval_minutes=0"],
        ["checkpoint.interval", "spot"],
    ),
    "no copy of the job file": (
        f'{HEAD}files = ["job.toml:/x/job.toml"]\nvolumes = ["v:/runs"]',
        [],
        ["cluster.files"],
    ),
    "another folder": (f'{HEAD}files = ["code:."]\nvolumes = ["v:/runs"]', [], ["code", "working directory"]),
    "ranks that the batch does not suit": (f'{HEAD}nodes = 3\nvolumes = ["/a:/runs"]', [], ["train.global_batch_size"]),
}


@pytest.mark.parametrize(("cluster", "options", "words"), UNFIT.values(), ids=UNFIT.keys())
def test_a_job_that_would_lose_its_checkpoints_is_refused(
    submit, cluster: str, options: list[str], words: list[str]
) -> None:
    Path("dstack.toml").write_text(cluster)
    code, _, err = submit(*options)
    assert code == 2
    assert not lacks(err, *words)
    assert calls() == []


def test_data_in_volumes_need_not_be_here(submit) -> None:
    data = ("--data.tokenizer.type=bytes", "--data.sources=[{ type = 'text', path = '/data/web' }]")
    Path("dstack.toml").write_text(HEAD + 'volumes = ["/nfs/runs:/runs"]\n')
    code, _, err = submit(*data, "--print")
    assert code == 2
    assert "data.sources.0.path" in err
    code, _, err = submit(*data, "--print", "--cluster.volumes=['/nfs/runs:/runs', 'corpus:/data']")
    assert (code, "the nodes check it: /data/web" in err) == (0, True), err
