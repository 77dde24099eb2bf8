"""What trains, where training begins, what a checkpoint holds, and resuming; as a user's job files have it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core import CheckpointError, Job, Trainer, load_model
from forge_core.checkpoint.storage import read_manifest
from forge_core.contracts.components import TrainingHook
from forge_kit.nn.adapters import adapter_names, adapters_off, merge_adapters
from forge_kit.tools.checkpoints import stored_tensors
from forge_plugin_adamw import AdamW
from forge_plugin_checkpoints import Parts
from forge_plugin_lora import LoRA
from forge_plugin_moe import MoE
from forge_plugin_parallel import FSDP
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.catalogs import installed
from forge_testing.outcomes import Stop, losses_of, state_differences
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, lacks, naming, problems_of

MODEL = Transformer(vocab_size=32, dim=32, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2))
METHODS = ("lora", "rslora", "dora")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has trained a model."""
    job = tiny_job(str(tmp_path_factory.mktemp("base")), installed(), model=MODEL, steps=10, precision="fp64")
    return Trainer(job, catalog=installed(), echo=lambda line: None).run().folder


@pytest.fixture
def adapted(base: Path, tmp_path: Path) -> Callable[..., Job]:
    """Jobs that train adapters beside that model's matrices, on other data."""

    def make(name: str = "adapted", method: Any = "lora", plugin: LoRA | None = None, **changes: Any) -> Job:
        settings: dict[str, Any] = {
            "model": MODEL,
            # One whose type is spelled alike in every process that continues a run
            "optimizer": AdamW(lr=1e-2),
            "steps": 6,
            "precision": "fp64",
            "job": {"name": name, "output": str(tmp_path)},
            "data": {"sources": (Numbers(start=7),)},
            "eval": {"at_start": True},
            "checkpoint": {"load": Parts(path=str(base))},
            "plugins": {"lora": plugin or LoRA(rank=2, method=method)},
        }
        return tiny_job(str(tmp_path), installed(), **{**settings, **changes})

    return make


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.head.logits(model({"input_ids": torch.arange(24).view(3, 8)}))


@pytest.mark.parametrize("method", METHODS)
def test_training_begins_with_the_model_that_was_loaded(adapted, base, train, lines, method):
    summary = train(adapted(method=method))
    plain = train(adapted("plain", plugins={}, steps=1))
    assert losses_of(summary)[0] == pytest.approx(losses_of(plain)[0], rel=1e-12)
    model = load_model(summary.folder).model
    before = logits(load_model(base).model)
    with adapters_off(model):
        assert torch.equal(logits(model), before)
    assert (logits(model) - before).abs().max() > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_merged_weights_are_those_of_a_plain_model(adapted, base, train, method):
    """The published forms: W + s B A, and with `dora` its rows at the lengths m."""
    model = load_model(train(adapted(method=method)).folder).model
    plain = load_model(base).model
    merged = merge_adapters(model)
    expected = dict(plain.named_parameters())
    own = dict(model.named_parameters())
    assert len(merged) == 14
    assert len(adapter_names(model)) == 14 * (3 if method == "dora" else 2)
    scale = {"lora": 32 / 2, "rslora": 32 / 2**0.5, "dora": 32 / 2}[method]
    for name, weight in merged.items():
        stem = name.removesuffix(".weight")
        whole = expected[name] + scale * own[f"{stem}.lora_b.weight"] @ own[f"{stem}.lora_a.weight"]
        if method == "dora":
            m = expected[name].norm(dim=1) + own[f"{stem}.lora_magnitude.weight"]
            whole = m[:, None] * whole / whole.norm(dim=1, keepdim=True)
        torch.testing.assert_close(weight, whole, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        for name, weight in merged.items():
            expected[name].copy_(weight)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-11, atol=1e-12)


def test_a_checkpoint_holds_what_was_trained_and_refers_to_its_base_for_the_rest(adapted, base, train):
    summary = train(adapted())
    folder = summary.folder / "checkpoints/step-6"
    written = json.loads((folder / "index.json").read_text())
    assert {name.split(".")[0] for name in written} == {"model", "optimizer"}
    assert all("lora_" in name for name in written)
    record = read_manifest(folder)["base"]
    assert record["path"] == str(base / "checkpoints/step-10")
    # Who reads it finds the whole model
    whole, of_base = stored_tensors(folder), stored_tensors(base / "checkpoints/step-10")
    assert all(whole[name] == of_base[name] for name in of_base if name.startswith("model."))
    assert {*record["tensors"]} == {name for name in of_base if name.startswith("model.")}


def test_a_base_that_changed_or_is_gone_is_refused_by_name(adapted, base, train, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    folder = train(adapted(checkpoint={"load": Parts(path=str(copy))})).folder
    manifest = copy / "checkpoints/step-10/manifest.json"
    text = manifest.read_text()
    manifest.write_text(text + "\n")
    with pytest.raises(CheckpointError, match=naming(folder, copy, "another checkpoint")):
        load_model(folder)
    manifest.write_text(text)
    assert load_model(folder)
    manifest.unlink()
    with pytest.raises(CheckpointError, match=naming(folder, copy, "not there")):
        load_model(folder)
    shutil.rmtree(copy)
    with pytest.raises(CheckpointError, match=naming(folder, copy, "not there")):
        load_model(folder)


def test_a_damaged_base_is_noticed_before_training_continues(adapted, base, train, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    checkpoint = {"load": Parts(path=str(copy))}
    train(adapted(checkpoint=checkpoint), Stop(step=3))
    file = next((copy / "checkpoints/step-10").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=naming(file.name, "SHA-256")):
        train(adapted(checkpoint=checkpoint))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_stops_and_continues_is_the_same_to_the_bit(adapted, train, method):
    whole = train(adapted("whole", method))
    train(adapted("parts", method), Stop(step=3))
    parts = train(adapted("parts", method))
    assert not state_differences(parts, whole)
    assert losses_of(parts) == losses_of(whole)
    assert read_manifest(parts.folder / "checkpoints/step-6")["base"]


def test_two_ranks_continue_what_one_began(adapted, train, tmp_path):
    train(adapted("whole"))
    train(adapted("parts"), Stop(step=3))

    def go_on(rank: int) -> None:
        job = adapted("parts", parallel={"fsdp": FSDP()})
        Trainer(job, catalog=installed(), echo=lambda line: None).run()

    run_on_ranks(2, go_on)
    model, expected = (load_model(tmp_path / name).model for name in ("parts", "whole"))
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-9, atol=1e-10)


class PutBack(TrainingHook):
    """Takes the state after step 2 and puts it back, once, after step 4."""

    def on_train_begin(self, context: Any) -> None:
        self.state: Any = None

    def on_step_end(self, context: Any) -> None:
        if context.step == 2 and self.state is None:
            self.state = context.take_state()
        elif context.step == 4 and self.state:
            context.put_state(self.state)
            self.state = {}


def test_a_state_in_memory_lacks_the_base_and_can_be_put_back(adapted, train):
    hook = PutBack()
    parts, whole = train(adapted("parts"), hook), train(adapted("whole"))
    assert hook.state == {}
    assert losses_of(parts)[-2:] == losses_of(whole)[-2:]
    models = [dict(load_model(summary.folder).model.named_parameters()) for summary in (parts, whole)]
    assert all(torch.equal(weight, models[1][name]) for name, weight in models[0].items())


def test_a_base_in_bfloat16_takes_half_the_memory(adapted, train):
    summary = train(adapted(precision="bf16", plugin=LoRA(rank=2, base_dtype="bf16")))
    parameters = dict(load_model(summary.folder).model.named_parameters())
    dtypes = {
        dtype: {n for n, p in parameters.items() if p.dtype == dtype} for dtype in (torch.bfloat16, torch.float32)
    }
    assert dtypes[torch.float32] == {name for name in parameters if "lora_" in name}
    assert len(dtypes[torch.bfloat16]) == len(parameters) - 28


def test_a_run_with_a_random_base_is_refused_until_it_has_begun(adapted, train):
    without = adapted(checkpoint={"load": ()})
    check_problems(problems_of(without), at("plugins.lora", "random", "[checkpoint.load]", "random_base"))
    assert not problems_of(adapted(checkpoint={"load": ()}, plugin=LoRA(rank=2, random_base=True)))
    train(adapted())
    assert not problems_of(without)  # its checkpoint has a base


def test_a_new_run_prints_what_must_stay(adapted, base, train):
    printed: list[str] = []
    train(adapted(steps=1), echo=printed.append)
    assert not lacks("\n".join(printed), f"keep {base}/checkpoints/step-10", "21 tensors")


def test_the_summary_says_how_much_trains(adapted, train):
    text = (train(adapted(steps=1)).folder / "plan.txt").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("adapters")]
    parameters = dict(load_model(adapted().job.output + "/adapted").model.named_parameters())
    trained = sum(p.numel() for name, p in parameters.items() if "lora_" in name)
    assert not lacks(line, "14 matrices", f"{trained:,} of {sum(p.numel() for p in parameters.values()):,}", "rank 2")


EXPERTS = Transformer(vocab_size=32, dim=16, layers=1, attention=GroupedQueryAttention(heads=4), ffn=MoE(experts=4))


@pytest.mark.parametrize(
    ("plugin", "model", "problem"),
    [
        (LoRA(targets=("blocks.*",)), MODEL, at("plugins.lora.targets.0", "blocks.*", "down")),
        (LoRA(targets=("q", "quary")), MODEL, at("plugins.lora.targets.1", "quary")),
        (LoRA(targets=("embedding",)), MODEL, at("plugins.lora.targets.0", "embedding", "train")),
        (LoRA(targets=("head",)), MODEL, at("plugins.lora.targets.0", "head", "train")),
        (LoRA(train=("heads.*",)), MODEL, at("plugins.lora.train.0", "heads.*")),
        (LoRA(rank=64), MODEL, at("plugins.lora.rank", "64")),
        (
            LoRA(rank=2, method="dora"),
            EXPERTS,
            at("plugins.lora.method", "dora", "layers.0.ffn.experts.gate", "rslora"),
        ),
        (LoRA(rank=2, base_dtype="bf16"), MODEL, at("plugins.lora.base_dtype", "fp64")),
    ],
)
def test_mistakes_are_named_when_the_job_is_checked(adapted, plugin, model, problem):
    check_problems(problems_of(adapted(plugin=plugin, model=model)), problem)
