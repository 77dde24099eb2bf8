"""Adapters beside matrices that the stage `float8` multiplies: the product in float8, A and B in their precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge_kit.nn.adapters import HasAdapter, adapters_off
from forge_plugin_lora import LoRA
from forge_plugin_lowbit.float8 import Float8
from forge_plugin_parallel import FSDP, TensorParallel
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import train as curve_of
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, problems_of

ATTENTION = GroupedQueryAttention(heads=4, kv_heads=4, bias=True, output_bias=True)
MODEL = Transformer(vocab_size=32, dim=32, layers=1, attention=ATTENTION, ffn=SwiGLU(hidden=64))


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Before processes are forked, so that each does not import torchao again."""
    import forge_plugin_lowbit.float8.stage  # noqa: F401


def job_of(folder: Any, method: Any = "lora", float8: Any = None, **stages: Any) -> Any:
    parallel = {"float8": float8 or Float8()} if float8 is not False else {}
    settings: dict[str, Any] = {"model": MODEL, "precision": "fp32", "seq_len": 16, "steps": 2}
    settings |= {"global_batch_size": 8, "micro_batch_size": 4, "data": {"sources": (Numbers(),)}}
    plugin = LoRA(rank=4, alpha=16, method=method, random_base=True)
    return tiny_job(str(folder), installed(), plugins={"lora": plugin}, parallel={**parallel, **stages}, **settings)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_the_output_is_the_float8_product_and_the_update(build, tmp_path, method):
    model = build(job_of(tmp_path, method)).model
    plain = build(job_of(tmp_path, method, float8=False)).model
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    [q, whole] = (each.get_submodule("layers.0.attention.q") for each in (model, plain))
    with torch.no_grad():
        for layer in (q, whole):
            layer.lora_b.weight.fill_(0.3)
            layer.bias.fill_(0.2)
            if method == "dora":
                layer.lora_magnitude.weight.fill_(0.1)
        with adapters_off(model), adapters_off(plain):
            in_float8, exact = q(x) - q.bias, whole(x) - whole.bias
        update = 4.0 * (x @ q.lora_a.weight.T) @ q.lora_b.weight.T
        expected = in_float8 + update
        if method == "dora":
            merged = q.weight + 4.0 * q.lora_b.weight @ q.lora_a.weight
            expected = expected * (q.weight.norm(dim=1) + 0.1) / merged.norm(dim=1)
        torch.testing.assert_close(q(x), expected + q.bias, rtol=1e-5, atol=1e-5)
    # It is rounded to float8, and not by more than float8 rounds
    error = ((in_float8 - exact).norm() / exact.norm()).item()
    assert 1e-3 < error < 0.1


def test_all_adapted_layers_change_and_no_adapter_does(build, tmp_path):
    run = build(job_of(tmp_path))
    adapted = {name for name, module in run.model.named_modules() if isinstance(module, HasAdapter)}
    changed = {name for name, module in run.model.named_modules() if hasattr(module, "float8_config")}
    assert len(adapted) == 7
    assert changed == adapted


def test_two_ranks_train_as_one(tmp_path):
    alone = curve_of(job_of(tmp_path / "alone"), installed())
    exact = curve_of(job_of(tmp_path / "exact", float8=False), installed())
    stages: dict[str, Any] = {"fsdp": FSDP(), "tp": TensorParallel(degree=2)}

    def observe(rank: int) -> dict[str, Any]:
        return {
            name: curve_of(job_of(tmp_path / name, **{name: stage}), installed()).losses
            for name, stage in stages.items()
        }

    for seen in run_on_ranks(2, observe):
        for losses in seen.values():
            assert losses == pytest.approx(alone.losses, rel=1e-3)
            assert losses[0] == pytest.approx(alone.losses[0], rel=1e-6)
    assert alone.losses[0] != pytest.approx(exact.losses[0], rel=1e-6)


def test_weights_gathered_in_float8_are_refused_beside_adapters(tmp_path):
    job = job_of(tmp_path, float8=Float8(all_gather=True), fsdp=FSDP())
    check_problems(problems_of(job), at("parallel.float8.all_gather", "layers.0.attention.q", "adapters"))
