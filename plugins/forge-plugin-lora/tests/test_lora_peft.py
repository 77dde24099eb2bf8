"""Exports with adapters, against `peft` and `transformers`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file
from torch import Tensor

from forge_core import CheckpointError, JobError, Trainer, load_model
from forge_core.cli import main
from forge_plugin_checkpoints import Parts
from forge_plugin_lora import LoRA, PEFTAdapter
from forge_plugin_moe import MoE, SoftmaxTopK
from forge_plugin_parallel import TensorParallel
from forge_plugin_text import Bytes, Text
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_plugin_weights import Export
from forge_plugin_weights.exporting import export_adapters, export_run
from forge_testing import Numbers, tiny_job
from forge_testing.catalogs import installed
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, lacks, naming, problems_of

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

DENSE = Transformer(vocab_size=32, dim=32, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2))
EXPERTS = Transformer(
    vocab_size=32,
    dim=32,
    layers=2,
    attention=GroupedQueryAttention(heads=4, kv_heads=2),
    ffn=MoE(experts=4, hidden=16, router=SoftmaxTopK(top_k=2)),
)
IDS = torch.arange(24).view(3, 8)


def trained(folder: Path, name: str, model: Any, **changes: Any) -> Path:
    settings: dict[str, Any] = {"job": {"name": name, "output": str(folder)}, "steps": 8, "precision": "fp32"}
    job = tiny_job(str(folder), installed(), model=model, **{**settings, **changes})
    return Trainer(job, catalog=installed(), echo=lambda line: None).run().folder


def adapted(base: Path, model: Any, plugin: LoRA) -> Path:
    load = {"load": Parts(path=str(base))}
    data = {"sources": (Numbers(start=7),)}
    return trained(base.parent, "adapted", model, plugins={"lora": plugin}, checkpoint=load, data=data)


def logits(run: Path) -> Tensor:
    return load_model(run)(IDS)


def published_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize(
    "plugin",
    [
        LoRA(rank=4),
        LoRA(rank=4, method="rslora", targets=("q", "v")),
        LoRA(rank=4, method="dora"),
    ],
    ids=lambda plugin: plugin.method,
)
def test_peft_computes_the_same_with_the_exported_adapter(tmp_path, plugin):
    base = trained(tmp_path, "base", DENSE)
    run = adapted(base, DENSE, plugin)
    assert (logits(run) - logits(base)).abs().max() > 1e-2
    assert main(["weights", "export", str(base), "--out", str(tmp_path / "hf")]) == 0
    assert main(["weights", "export", str(run), "--out", str(tmp_path / "adapter"), "--adapters"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with_adapter = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    torch.testing.assert_close(published_logits(with_adapter), logits(run), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_transformers_computes_the_same_with_merged_weights(tmp_path, model, capsys):
    base = trained(tmp_path, "base", model)
    run = adapted(base, model, LoRA(rank=4))
    out = tmp_path / "merged"
    capsys.readouterr()
    assert main(["weights", "export", str(run), "--out", str(out), "--merge", "--verify", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["merging"]["lost"] < 1e-5
    assert facts["parity"]["computed"]
    hf = transformers.AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(published_logits(hf), logits(run), rtol=1e-6, atol=2e-6)
    assert not list(tmp_path.glob(".merging-*"))


def test_merged_weights_go_into_a_gguf_file(tmp_path, caplog):
    base = trained(tmp_path, "base", DENSE)
    run = adapted(base, DENSE, LoRA(rank=4))
    words = ["weights", "export", str(run), "--merge", "--out"]
    assert main([*words, str(tmp_path / "merged")]) == 0
    assert main([*words, str(tmp_path / "merged.gguf")]) == 0
    assert main(["weights", "verify", str(tmp_path / "merged"), str(tmp_path / "merged.gguf")]) == 0
    assert "rounding took" not in caplog.text
    assert main([*words, str(tmp_path / "rounded.gguf"), "--dtype", "bfloat16"]) == 0
    assert "rounding took" in caplog.text


def test_a_model_that_has_a_row_for_each_token_of_its_tokenizer_is_compared_too(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("To be, or not to be: that is the question. " * 20)
    data = {"sources": (Text(path=str(tmp_path / "text.txt")),), "tokenizer": Bytes()}
    model = evolve(DENSE, vocab_size=0)
    base = trained(tmp_path, "base", model, data=data)
    assert main(["weights", "export", str(base), "--out", str(tmp_path / "plain"), "--verify"]) == 0
    load = {"load": Parts(path=str(base))}
    run = trained(tmp_path, "adapted", model, plugins={"lora": LoRA(rank=4)}, checkpoint=load, data=data)
    out = str(tmp_path / "merged")
    capsys.readouterr()
    assert main(["weights", "export", str(run), "--out", out, "--merge", "--verify"]) == 0
    assert not lacks(capsys.readouterr().out, "adapters added to 14 matrices", "nothing was lost")


def test_exports_during_a_run_with_adapters_are_refused(tmp_path):
    job = tiny_job(
        str(tmp_path),
        installed(),
        model=DENSE,
        plugins={"mine": LoRA(rank=2, random_base=True)},
        hooks={"export": Export()},
    )
    check_problems(problems_of(job), at("hooks.export", "plugins.mine", "--merge", "--adapters"))


def test_what_rounding_takes_from_the_update_is_stated(tmp_path, capsys):
    base = trained(tmp_path, "base", DENSE)
    run = adapted(base, DENSE, LoRA(rank=4))
    out = str(tmp_path / "merged")
    capsys.readouterr()
    assert main(["weights", "export", str(run), "--out", out, "--merge", "--dtype", "bfloat16", "--json"]) == 0
    merging = json.loads(capsys.readouterr().out)["merging"]
    # In bfloat16 a weight of 0.02 has steps of 2^-13: by the closed form of rounding, here computed apart
    model, plain = load_model(run).model, load_model(base).model
    shares = {}
    for name, weight in plain.named_parameters():
        stem = name.removesuffix(".weight")
        own = dict(model.named_parameters())
        if f"{stem}.lora_b.weight" in own:
            update = 8 * own[f"{stem}.lora_b.weight"] @ own[f"{stem}.lora_a.weight"]
            whole = weight + update
            shares[name] = float((whole.bfloat16().float() - whole).norm() / update.norm())
    assert merging["name"] == max(shares, key=lambda name: shares[name])
    assert merging["lost"] == pytest.approx(max(shares.values()), rel=1e-3)


def test_adapters_of_experts_have_the_expert_in_their_names(tmp_path):
    """One module per expert, so that none is paired with the columns of another."""
    base = trained(tmp_path, "base", EXPERTS)
    run = adapted(base, EXPERTS, LoRA(rank=4, targets=("stack",)))
    folder = export_adapters(run, tmp_path / "adapter", catalog=installed())
    tensors = load_file(folder / "adapter_model.safetensors")
    own = dict(load_model(run).model.named_parameters())
    for expert in range(4):
        stem = f"base_model.model.model.layers.1.block_sparse_moe.experts.{expert}.w2"
        assert torch.equal(tensors[f"{stem}.lora_A.weight"], own["layers.1.ffn.experts.down.lora_a.weight"][expert])
        assert torch.equal(tensors[f"{stem}.lora_B.weight"], own["layers.1.ffn.experts.down.lora_b.weight"][expert])


def test_an_export_says_what_to_do_with_adapters(tmp_path):
    base = trained(tmp_path, "base", DENSE)
    run = adapted(base, DENSE, LoRA(rank=4, train=("head.*",)))
    with pytest.raises(JobError, match=naming("--merge", "--adapters")):
        export_run(run, tmp_path / "out", catalog=installed())
    with pytest.raises(JobError, match=naming("head.weight", "--merge")):
        export_adapters(run, tmp_path / "out", catalog=installed())
    for export, flag in ((lambda *a, **k: export_run(*a, merge=True, **k), "--merge"), (export_adapters, "--adapters")):
        with pytest.raises(JobError, match=naming("no adapters", flag)):
            export(base, tmp_path / "out", catalog=installed())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_continues_with_an_adapter_that_peft_saved(tmp_path, ranks, method):
    """One that is drawn at random, so that nothing of it is zero, of `peft` alone."""
    base = trained(tmp_path, "base", DENSE)
    assert main(["weights", "export", str(base), "--out", str(tmp_path / "hf")]) == 0
    keys = {"init_lora_weights": False, "use_dora": method == "dora"}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **keys)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), config)
    model.save_pretrained(tmp_path / "adapter")

    def begin(rank: int) -> None:
        tables = (Parts(path=str(base)), PEFTAdapter(path=str(tmp_path / "adapter")))
        parallel = {"parallel": {"tp": TensorParallel(degree=2)}} if ranks == 2 else {}
        plugins = {"lora": LoRA(rank=4, alpha=8, targets=("q", "down"), method=method)}
        settings = {"load": tables, "at_start": True, "keep": 0}
        trained(tmp_path, "begun", DENSE, checkpoint=settings, plugins=plugins, steps=1, **parallel)

    begin(0) if ranks == 1 else run_on_ranks(2, begin)
    torch.testing.assert_close(
        logits(tmp_path / "begun/checkpoints/step-0"), published_logits(model), rtol=1e-5, atol=1e-5
    )


def test_an_adapter_of_another_kind_is_refused_by_name(tmp_path):
    base = trained(tmp_path, "base", DENSE)
    run = adapted(base, DENSE, LoRA(rank=4, targets=("q",)))
    folder = export_adapters(run, tmp_path / "adapter", catalog=installed())
    tables = (Parts(path=str(base)), PEFTAdapter(path=str(folder)))

    def job_of(plugins: Any, load: Any = tables) -> Any:
        return tiny_job(str(tmp_path), installed(), model=DENSE, plugins=plugins, checkpoint={"load": load})

    def with_config(folder: Path, changes: dict[str, Any]) -> Any:
        other = Path(shutil.copytree(folder, tmp_path / "other", dirs_exist_ok=True))
        config = json.loads((folder / "adapter_config.json").read_text())
        (other / "adapter_config.json").write_text(json.dumps(config | changes))
        return Parts(path=str(base)), PEFTAdapter(path=str(other))

    def refused(job: Any) -> list[str]:
        return [str(problem) for problem in problems_of(job)]

    assert not refused(job_of({"lora": LoRA(rank=4, targets=("q",))}))
    [other_rank] = refused(job_of({"lora": LoRA(rank=2, targets=("q",))}))
    assert not lacks(other_rank, "checkpoint.load.1.path", "r = 4", 2)
    [before_its_model] = refused(job_of({"lora": LoRA(rank=4, targets=("q",), method="dora")}, tables[::-1]))[:1]
    assert not lacks(before_its_model, "checkpoint.load.0", "last")
    [no_plugin] = refused(job_of({}))
    assert not lacks(no_plugin, "checkpoint.load.1", "[plugins.lora]")
    [no_model] = refused(job_of({"lora": LoRA(rank=4, targets=("q",))}, (PEFTAdapter(path=str(folder)),)))
    assert not lacks(no_model, "[[checkpoint.load]]")
    for changes, key in (
        ({"use_dora": True}, "use_dora"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    ):
        [of_another_kind] = refused(job_of({"lora": LoRA(rank=4, targets=("q",))}, with_config(folder, changes)))
        assert not lacks(of_another_kind, "checkpoint.load.1.path", key)
    assert not refused(job_of({"lora": LoRA(rank=4, targets=("q",))}, with_config(folder, {"rank_pattern": {}})))
    plugins = {"lora": LoRA(rank=4, targets=("q", "k"))}
    with pytest.raises(CheckpointError, match=naming("layers.0.self_attn.k_proj", "targets")):
        trained(tmp_path, "other", DENSE, checkpoint={"load": tables}, plugins=plugins)
