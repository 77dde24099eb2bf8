"""A base in NF4 as a user's job files have it: what trains, what it takes, what checkpoints and exports hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from safetensors.torch import load_file
from torch import Tensor

from forge_core import ForgeError, Job, Trainer, load_model
from forge_core.checkpoint.storage import read_manifest
from forge_core.cli import main
from forge_core.contracts.components import TrainingHook
from forge_core.parallel.initialise import bare_context, bare_model
from forge_core.parallel.layout import layout_of
from forge_kit.nn.adapters import adapters_off, merge_adapters
from forge_kit.nn.position_probe import leaking_part, undeclared_mixer
from forge_kit.torch_internals import parameters_of
from forge_plugin_adamw import AdamW
from forge_plugin_checkpoints import Parts
from forge_plugin_lora import LoRA
from forge_plugin_lora.nf4 import dequantise, pair_table, quantise, stored_bytes
from forge_plugin_lora.nf4_matrix import InNF4, in_nf4
from forge_plugin_lowbit import AdamWBF16
from forge_plugin_lowbit.float8 import Float8
from forge_plugin_moe import MoE
from forge_plugin_muon import Muon
from forge_plugin_parallel import TensorParallel
from forge_plugin_plan.fake_world import BroadcastLog
from forge_plugin_plan.simulate import simulate
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_testing import Numbers, SplittableModel, tiny_job
from forge_testing.catalogs import installed
from forge_testing.outcomes import Stop, losses_of, state_differences
from forge_testing.refusals import at, check_problems, lacks, naming, problems_of

ATTENTION = GroupedQueryAttention(heads=4, kv_heads=2, bias=True)
MODEL = Transformer(vocab_size=32, dim=64, layers=2, attention=ATTENTION, ffn=SwiGLU(hidden=128))
EXPERTS = Transformer(vocab_size=32, dim=64, layers=1, attention=ATTENTION, ffn=MoE(experts=4, hidden=64))
MODELS: Mapping[str, Any] = {"dense": MODEL, "experts": EXPERTS}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """Folders of runs that have trained a model."""
    folders: dict[Any, Path] = {}

    def of(model: Any) -> Path:
        if model not in folders:
            job = tiny_job(str(tmp_path_factory.mktemp("base")), installed(), model=model, steps=5)
            folders[model] = Trainer(job, catalog=installed(), echo=lambda line: None).run().folder
        return folders[model]

    return of


@pytest.fixture
def adapted(bases: Any, tmp_path: Path) -> Callable[..., Job]:
    """Jobs that train adapters beside such a model."""

    def make(name: str = "adapted", model: Any = MODEL, base_dtype: Any = "nf4", **changes: Any) -> Job:
        keys = {key: changes.pop(key) for key in ("method", "targets", "train", "random_base") if key in changes}
        settings: dict[str, Any] = {
            "model": model,
            "optimizer": AdamW(lr=1e-2),
            "steps": 4,
            "job": {"name": name, "output": str(tmp_path)},
            "data": {"sources": (Numbers(start=7),)},
            "checkpoint": {"load": Parts(path=str(bases(model)))},
            "plugins": {"lora": LoRA(rank=4, base_dtype=base_dtype, **keys)},
        }
        return tiny_job(str(tmp_path), installed(), **{**settings, **changes})

    return make


class Rounded(TrainingHook):
    """Gives a plain base the values that NF4 stands for."""

    names: Any = None

    def on_train_begin(self, context: Any) -> None:
        pairs = pair_table()
        for name, weight in context.model.named_parameters():
            if name.removesuffix(".weight") in self.names:
                values = dequantise(*quantise(weight.detach().float(), pairs), pairs, torch.float32)
                weight.data.copy_(values)


@pytest.mark.parametrize(
    ("model", "precision", "keys"),
    [
        ("dense", "fp32", {}),
        ("dense", "bf16", {"targets": ("q", "v")}),
        ("dense", "fp64", {"method": "dora", "train": ("*norm*", "*.q.bias")}),
        ("experts", "fp32", {}),
    ],
)
def test_it_trains_as_a_plain_base_of_the_same_values(adapted, train, model, precision, keys):
    model = MODELS[model]
    summary = train(adapted(model=model, precision=precision, **keys))
    rounded = Rounded()
    rounded.names = {name for name, _ in in_nf4(load_model(summary.folder).model)}
    # The queries' bias is added to the product, not within it
    plain = train(adapted("plain", model=model, precision=precision, base_dtype="unchanged", **keys), rounded)
    exact = train(adapted("exact", model=model, precision=precision, base_dtype="unchanged", **keys))
    tolerance = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 1e-3}[precision]
    assert losses_of(summary) == pytest.approx(losses_of(plain), rel=tolerance)
    assert losses_of(summary) != pytest.approx(losses_of(exact), rel=tolerance)


def test_all_matrices_of_layers_are_bytes_before_they_have_values(adapted, build):
    """No memory of the size of the base is ever allocated, and a parameter in NF4 keeps nothing for its gradient."""
    run = build(adapted(precision="bf16", targets=("q", "v")))
    parameters = dict(run.model.named_parameters())
    matrices = dict(in_nf4(run.model))
    assert len(matrices) == 14  # attention and feed-forward, with adapters or without
    expected = sum(stored_bytes(module.nf4_shape) for module in matrices.values())
    stored = [parameter for name, parameter in parameters.items() if parameter.dtype == torch.uint8]
    assert sum(each.nbytes for each in stored) == expected
    assert not any(each.requires_grad for each in stored)
    weights = sum(module.nf4_shape.numel() for module in matrices.values())
    # 64 columns: a row of one or two blocks, whose own eight bytes count more than in a model that is used
    assert 8 * expected / weights < 5.2
    dtypes = {name: p.dtype for name, p in parameters.items() if p.dtype != torch.uint8}
    assert dtypes.pop("embedding.weight") == dtypes.pop("head.weight") == torch.bfloat16
    assert set(dtypes.values()) == {torch.float32}


def test_nothing_of_the_size_of_a_weight_is_kept_for_the_backward_pass(adapted, build):
    model = build(adapted()).model
    module = model.get_submodule("layers.0.ffn.up")
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(2, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = module(x)
    whole = module.nf4_shape.numel()
    assert any(tensor.dtype == torch.uint8 for tensor in kept)
    assert all(tensor.numel() < whole for tensor in kept)
    y.sum().backward()
    assert x.grad is not None
    assert module.lora_b.weight.grad is not None
    assert module.weight.grad is None


def test_planned_memory_counts_four_bits_and_parameters_stay_as_many(adapted):
    def planned(base_dtype: str) -> Any:
        job = adapted(base_dtype=base_dtype, precision="bf16")
        if dist.is_initialized():  # a plan takes the place of one
            dist.destroy_process_group()
        return simulate(job, installed(), 1, 0, BroadcastLog(), torch.device("cpu"))

    in_four, in_sixteen = planned("nf4"), planned("bf16")
    assert not in_four.failure
    matrices = 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128)
    assert in_sixteen.weights - in_four.weights == pytest.approx(1.4 * matrices, rel=0.05)
    assert sum(in_four.outline.sizes.values()) == sum(in_sixteen.outline.sizes.values())
    assert in_four.outline.flops == in_sixteen.outline.flops
    assert in_four.traffic.flops == in_sixteen.traffic.flops


def test_a_run_that_stops_and_continues_is_the_same_to_the_bit(adapted, train):
    whole = train(adapted("whole"))
    train(adapted("parts"), Stop(step=2))
    parts = train(adapted("parts"))
    assert not state_differences(parts, whole)
    assert losses_of(parts) == losses_of(whole)
    folder = parts.folder / "checkpoints/step-4"
    assert all("lora_" in name for name in json.loads((folder / "index.json").read_text()))
    assert len(read_manifest(folder)["base"]["tensors"]) == 29
    first, again = (dict(in_nf4(load_model(each.folder).model)) for each in (whole, parts))
    assert all(torch.equal(module.weight, again[name].weight) for name, module in first.items())


def test_with_adapters_off_it_is_the_base_in_nf4_and_merging_adds_to_that(adapted, bases, train):
    model = load_model(train(adapted(targets=("q", "v"))).folder).model
    plain = load_model(bases(MODEL)).model
    tensors, merged, pairs = model.state_dict(), merge_adapters(model), pair_table()
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if isinstance(model.get_submodule(name.rpartition(".")[0]), InNF4) and name.endswith(".weight"):
                weight.copy_(dequantise(*quantise(weight, pairs), pairs, torch.float32))
                # What a checkpoint or an export reads
                assert torch.equal(tensors[name].clone(), weight)
                assert torch.equal(torch.cat([tensors[name], weight]), torch.cat([weight, weight]))
        ids = {"input_ids": torch.arange(16).view(2, 8)}
        with adapters_off(model):
            assert torch.allclose(model(ids), plain(ids), rtol=1e-5, atol=1e-6)
        for name, weight in merged.items():
            plain.get_parameter(name).copy_(weight)
        assert torch.allclose(model(ids), plain(ids), rtol=1e-4, atol=1e-5)
    assert len(merged) == 4


def test_an_export_computes_what_was_trained(adapted, bases, train, tmp_path, capsys):
    run = train(adapted(targets=("q", "v"))).folder
    out = tmp_path / "merged"
    capsys.readouterr()
    assert main(["weights", "export", str(run), "--out", str(out), "--merge", "--verify", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parity"]["computed"]
    # Of the update; nothing is rounded to four bits again
    assert facts["merging"]["matrices"] == 4
    assert facts["merging"]["lost"] < 1e-5
    exported = load_file(out / "model.safetensors")
    model, plain = load_model(run).model, load_model(bases(MODEL)).model
    # In NF4, without an adapter
    values = model.state_dict()["layers.0.ffn.up.weight"].clone()
    assert torch.equal(exported["model.layers.0.mlp.up_proj.weight"], values)
    assert not torch.equal(plain.get_parameter("layers.0.ffn.up.weight"), values)


@pytest.mark.parametrize("along", [0, 1])
def test_a_base_that_ranks_have_saved_in_parts_is_the_same(adapted, build, along):
    """Each with some rows (fully sharded) or columns (tensor parallel)."""
    model = build(adapted()).model
    module = dict(in_nf4(model))["layers.0.ffn.down"]
    values = torch.randn(64, 128)
    whole = model.state_dict()["layers.0.ffn.down.weight"]
    whole.copy_(values)
    expected = module.weight.clone(), module.nf4_rows.weight.clone()
    module.weight.zero_()
    module.nf4_rows.weight.zero_()
    for part in (slice(0, 40), slice(40, 64 if along == 0 else 128)):
        place = (part, slice(0, 128)) if along == 0 else (slice(0, 64), part)
        whole[place].copy_(values[place])
    assert torch.equal(module.weight, expected[0])
    assert torch.equal(module.nf4_rows.weight, expected[1])
    assert module.nf4_written == values.numel()
    assert module.nf4_pieces is None


@pytest.mark.parametrize(("model", "method"), [(MODEL, "lora"), (MODEL, "dora"), (EXPERTS, "lora")])
def test_a_check_of_what_positions_mix_still_computes_with_the_model(adapted, model, method):
    """Stages that divide sequences, and packing, run the model before it has values."""
    job = adapted(model=model, method=method, precision="bf16")
    bare = bare_model(job, bare_context(job, layout_of(job, 1), installed(), torch.device("cpu")))
    assert undeclared_mixer(bare) is None
    assert leaking_part(bare) is None
    # And it would find something: a feed-forward that mixes positions
    feed_forward = bare.get_submodule("layers.0.ffn")
    computed = feed_forward.forward
    feed_forward.forward = lambda x, *others: computed(x.roll(5, 1), *others)
    assert undeclared_mixer(bare).startswith("layers.0.ffn")


def test_layers_of_torch_and_other_optimizers_train_beside_it(adapted, train):
    model = SplittableModel(dim=64)
    summary = train(adapted(model=model, optimizer=Muon(lr=1e-2)))
    assert losses_of(summary)[-1] < losses_of(summary)[0]


def test_the_summary_has_size_and_rounding(adapted, train):
    text = (train(adapted(steps=1)).folder / "plan.txt").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("base ")]
    assert "NF4: 14 matrices with 73,728 weights" in line
    # Of normally distributed weights, in theory as well: Dettmers et al. 2023, table 2, order formats by what they lose
    assert 0.07 < float(line.partition("rounded by ")[2].partition("%")[0]) / 100 < 0.11


def test_the_summary_names_matrices_that_do_not_fit(adapted, train):
    model = evolve(MODEL, ffn=SwiGLU(hidden=80))
    summary = train(adapted(model=model, steps=1))
    [line] = [line for line in (summary.folder / "plan.txt").read_text().splitlines() if line.startswith("base ")]
    assert not lacks(line, "NF4: 12 matrices", "layers.0.ffn.down", "layers.1.ffn.down", 64)
    dtypes = {name: p.dtype for name, p in load_model(summary.folder).model.named_parameters()}
    assert dtypes["layers.0.ffn.down.weight"] == torch.float32
    assert dtypes["layers.0.ffn.up.weight"] == torch.uint8


def test_bytes_that_fsdp_gathers_in_the_compute_dtype_are_the_same(adapted, build):
    """As torch 2.11 does: it casts all that it gathers."""
    module: Any = dict(in_nf4(build(adapted()).model))["layers.0.ffn.down"]
    module.write(torch.randn(64, 128), ((0, 64), (0, 128)))
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    expected = module(x)
    for each in (module, module.nf4_rows):
        parameters_of(each)["weight"] = each.weight.to(torch.bfloat16)
    assert torch.equal(module(x), expected)


def test_a_base_that_is_not_whole_or_not_one_checkpoint_is_refused(adapted, bases, train):
    base = str(bases(MODEL))
    lacking = adapted(checkpoint={"load": Parts(path=base, exclude=("layers.1.ffn.up.weight",))})
    with pytest.raises(ForgeError, match=naming("layers.1.ffn.up", "has not loaded", "plugins.lora.train")):
        train(lacking)
    second = Parts(path=base, include=("layers.1.*",))
    tables = (Parts(path=base, exclude=("layers.1.*",)), second)
    with pytest.raises(ForgeError, match=naming("layers.1.attention.q", "one checkpoint", "bf16")):
        train(adapted("two", checkpoint={"load": tables}))


NARROW = Transformer(vocab_size=32, dim=48, layers=1, attention=GroupedQueryAttention(heads=4), ffn=SwiGLU(hidden=80))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"random_base": True}, at("plugins.lora.random_base", "checkpoints", "[checkpoint.load]")),
        ({"optimizer": AdamWBF16(parameter_dtype="bf16")}, at("plugins.lora.base_dtype", "bfloat16", "adamw")),
        ({"model": NARROW}, at("plugins.lora.base_dtype", "64 weights", "48 columns", "bf16")),
        ({"model": EXPERTS, "method": "dora"}, at("plugins.lora.method", "dora", "experts")),
    ],
)
def test_mistakes_are_named_when_the_job_is_checked(adapted, changes, problem):
    check_problems(problems_of(adapted(**changes)), problem)


def test_float8_products_of_matrices_in_nf4_are_refused(adapted):
    job = adapted(parallel={"float8": Float8()}, seq_len=16)
    problems = [problem for problem in problems_of(job) if problem.path.startswith("plugins")]
    check_problems(problems, at("plugins.lora.base_dtype", "[parallel.float8]", "bf16"))


def test_blocks_that_ranks_would_cut_are_named_when_the_job_is_checked(adapted):
    job = adapted(parallel={"tp": TensorParallel(degree=2)})
    fault = at("plugins.lora.base_dtype", "layers.0.attention.o", "64 columns", "32 for each of 2", "degree")
    check_problems(problems_of(job, ranks=2), fault)
