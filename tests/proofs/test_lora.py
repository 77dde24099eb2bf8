"""`lora.py`: what is frozen, what is trained, merging, resuming, two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forge_core.cli import main
from forge_core.engine.build import build_bare_model, build_context
from forge_core.parallel.initialise import materialise
from forge_kit.tools.checkpoints import stored_tensors
from forge_plugin_losses.teacher import load_trained
from forge_testing import curves
from forge_testing.curves import Difference
from forge_testing.outcomes import Stop, losses_of, state_differences
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, naming, refuses, refuses_all

FILE = Path(__file__).with_name("lora.py")
LOAD = 'checkpoint.load = {{ path = "{base}", exclude = ["*.lora.*"] }}\n'
ADAPTED = """
train.steps = 8
train.precision = "fp64"
optimizer.lr = 3e-3
eval.at_start = true

[plugins.lora]
type = "PROOFS/lora.py:LoRA"
rank = 2

[[data.sources]]
type = "forge_testing:Numbers"
start = 7
"""


@pytest.fixture
def adapted(job_files, run_folder):
    """Of a model that another run has trained, by the command line."""
    assert main(job_files("base", 'train = { steps = 20, precision = "fp64" }')) == 0
    text = LOAD.format(base=run_folder("base")) + ADAPTED
    assert main(job_files("adapted", text)) == 0
    return text


def exported(folder: Path, path: Path) -> dict[str, torch.Tensor]:
    assert main(["checkpoints", str(folder), "export", "--out", str(path)]) == 0
    return load_file(path)


def test_only_the_adapters_are_trained(adapted, run_folder, records, tmp_path):
    before = exported(run_folder("base"), tmp_path / "before.safetensors")
    after = exported(run_folder("adapted"), tmp_path / "after.safetensors")
    adapters = after.keys() - before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert len(adapters) == 2 * 2 * 2  # A and B of both matrices in 2 layers
    assert all(after[name].any() for name in adapters)
    state = [name for name in stored_tensors(run_folder("adapted") / "checkpoints/step-8") if "optimizer" in name]
    assert {name.removeprefix("optimizer.").rpartition(".")[0] for name in state} == adapters
    losses = records("adapted", "eval/loss")
    assert losses[-1] < losses[0]


def test_it_starts_where_the_model_was(adapted, records, job_of, train):
    """B is zero: the first loss is that of the model without adapters, on the same data."""
    text = adapted.partition("[plugins.lora]")[0].replace(', exclude = ["*.lora.*"]', "")
    train(job_of("plain", f'{text}[[data.sources]]\ntype = "forge_testing:Numbers"\nstart = 7\n'))
    assert records("adapted", "loss")[0] == records("plain", "loss")[0]
    assert records("adapted", "loss")[1] != records("plain", "loss")[1]


def test_merged_weights_give_the_logits_of_the_adapted_model(adapted, run_folder, tmp_path, job_of, catalog):
    exported(run_folder("adapted"), tmp_path / "adapted.safetensors")
    subprocess.run([sys.executable, FILE, "adapted.safetensors", "merged.safetensors"], cwd=tmp_path, check=True)
    job = job_of("again", 'train.precision = "fp64"')
    context = build_context(job, catalog, None)
    plain, _ = build_bare_model(job, context)
    materialise(plain, context.device, seed=0)
    plain.load_state_dict(load_file(tmp_path / "merged.safetensors"))
    adapted_model = load_trained(run_folder("adapted"), context).model
    batch = {"input_ids": torch.arange(24).view(3, 8)}
    logits = plain.head.logits(plain(batch))
    torch.testing.assert_close(logits, adapted_model.head.logits(adapted_model(batch)), rtol=1e-12, atol=1e-12)
    base = load_trained(run_folder("base"), context).model
    assert (logits - base.head.logits(base(batch))).abs().max() > 1e-3


def test_a_file_without_adapters_is_not_merged(train, job_of, tmp_path, catalog):
    exported(train(job_of("base")).folder, tmp_path / "base.safetensors")
    lora = sys.modules[catalog.load("plugin", f"{FILE}:LoRA").__module__]
    with pytest.raises(SystemExit, match=naming("base.safetensors", "adapters", "LoRA")):
        lora.merge(str(tmp_path / "base.safetensors"), str(tmp_path / "merged.safetensors"))


def test_a_run_that_stops_and_continues_is_the_same_to_the_bit(adapted, job_of, train, run_folder):
    whole = train(job_of("whole", adapted))
    train(job_of("parts", adapted), Stop(step=3))
    parts = train(job_of("parts", adapted))
    assert not state_differences(parts, whole)
    assert losses_of(parts) == losses_of(whole)


def test_two_ranks_train_like_one(job_of, catalog):
    expected = curves.train(job_of("one", ADAPTED), catalog)
    sharded = job_of("two", f"{ADAPTED}\n[parallel.fsdp]\n", ranks=2)
    for found in run_on_ranks(2, lambda rank: curves.train(sharded, catalog)):
        difference = Difference.between(found, expected)
        assert max(difference.initial, difference.loss, difference.norm, difference.gradient) < 1e-9
        assert difference.weights < 1e-7
    changed = {name for name in expected.weights if not torch.equal(expected.weights[name], expected.initial[name])}
    assert changed == {name for name in expected.weights if ".lora." in name}


def test_a_stage_that_cannot_split_them_says_so(job_of):
    text = 'model.type = "forge_testing:SplittableModel"\n' + ADAPTED
    adapters = [f"'layers.0.pair.{name}.lora.{part}'" for name in ("up", "down") for part in "ab"]
    with refuses_all(*(at("parallel.tp", "SplittableNetwork", name) for name in adapters)):
        job_of("tp", f"{text}\n[parallel.tp]\ndegree = 2\n", ranks=2)


def test_a_pattern_that_fits_nothing_is_refused_when_the_job_is_checked(job_of):
    with refuses("plugins.lora.match", "'blocks.*'", "layers.0.up"):
        job_of("wrong", ADAPTED.replace("rank = 2", 'match = "blocks.*"'))
