"""The plan of adapters beside frozen weights: its figures are those that torch itself measures of a run, to 10 %."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import real
from attrs import evolve
from test_plan_figures import plan_of

from forge_core import load_job
from forge_core.losses import CrossEntropy
from forge_core.parallel.mesh import leave_group
from forge_core.plugins.catalog import Catalog
from forge_plugin_lora import LoRA
from forge_plugin_losses import ChunkedCrossEntropy
from forge_plugin_parallel import ActivationCheckpointing
from forge_plugin_plan.estimate import Plan
from forge_plugin_plan.report import report
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_testing import Numbers, tiny_job

CONFIG = Path(__file__).parents[3] / "configs" / "llama-8b-lora-1gpu.toml"
DIM, LAYERS, HIDDEN, VOCABULARY, LENGTH, ROWS, RANK = 64, 2, 192, 512, 128, 2, 4
BF16, FLOAT = 2, 4
LORA = LoRA(rank=RANK, base_dtype="bf16", random_base=True)
CHUNKED = ChunkedCrossEntropy(chunk_tokens=64)
RECOMPUTED = {"activation_checkpointing": ActivationCheckpointing()}
SELECTIVE = {"activation_checkpointing": ActivationCheckpointing(mode="selective")}
CASES: dict[str, dict[str, Any]] = {
    "adapters": {"plugins": {"lora": LORA}},
    "dora, chunked loss": {
        "plugins": {"lora": evolve(LORA, method="dora")},
        "loss": CHUNKED,
    },
    "recomputed": {"plugins": {"lora": LORA}, "parallel": RECOMPUTED},
    "recomputed in part, chunked loss": {
        "plugins": {"lora": LORA},
        "loss": CHUNKED,
        "parallel": SELECTIVE,
    },
}


def job_of(**changes: Any) -> Any:
    attention = GroupedQueryAttention(heads=4, kv_heads=2, backend="flash")
    ffn = SwiGLU(hidden=HIDDEN)
    model = Transformer(dim=DIM, layers=LAYERS, vocab_size=VOCABULARY, attention=attention, ffn=ffn)
    settings = {"micro_batch_size": ROWS, "global_batch_size": 2 * ROWS, "seq_len": LENGTH, "device": "cpu"}
    settings |= {"grad_clip_norm": 1.0, "precision": "bf16", "loss": CrossEntropy()}
    return tiny_job("unused", Catalog.installed(), model=model, data={"sources": (Numbers(),)}, **settings | changes)


@pytest.mark.parametrize("name", CASES)
def test_the_peak_and_the_flops_of_a_step_with_adapters_are_those_that_torch_measures(name: str) -> None:
    [planned] = plan_of(job_of(**CASES[name]), 1).ranks
    assert planned.memory is not None, planned.failure
    assert planned.traffic is not None
    leave_group()
    peak, flops = real.peak_and_flops(job_of(**CASES[name]))
    assert planned.memory.peak == pytest.approx(peak, rel=0.1)
    assert planned.traffic.flops == flops
    # Both are far from the figures of a model that trains all of its weights
    [whole] = plan_of(job_of(**{key: value for key, value in CASES[name].items() if key != "plugins"}), 1).ranks
    assert whole.memory is not None
    assert whole.traffic is not None
    assert whole.memory.peak > 1.2 * peak
    assert whole.traffic.flops > 1.1 * flops


def arithmetic(plan: Plan) -> tuple[int, int, float]:
    """Returns the parameters of the base and of the adapters, and the FLOPs of a step, from the keys of the job."""
    job = plan.job
    model: Any = job.model
    dim, hidden, layers, vocabulary = model.dim, model.ffn.hidden, model.layers, model.vocab_size
    kv = dim * model.attention.kv_heads // model.attention.heads
    rank, tokens = job.plugins["lora"].rank, job.train.global_batch_size * job.train.seq_len
    shapes = [(dim, dim), (kv, dim), (kv, dim), (dim, dim), (hidden, dim), (hidden, dim), (dim, hidden)]
    matrices = layers * sum(rows * columns for rows, columns in shapes)
    base = matrices + 2 * vocabulary * dim + (2 * layers + 1) * dim
    adapters = layers * sum(rank * (rows + columns) for rows, columns in shapes)
    # Frozen: two going forward, and two for the gradient of the input, which q, k and v of the first layer do not need.
    # A of these three needs no gradient of its input either.
    unneeded = 2 * (dim * dim + 2 * kv * dim) + 2 * 3 * rank * dim
    # Scores and values, causal: two products going forward, and five going back
    attention = layers * (2 + 5) * 2 * job.train.seq_len / 2 * dim
    per_token = 4 * (matrices + vocabulary * dim) + 6 * adapters - unneeded + attention
    return base, adapters, per_token * tokens


def test_a_plan_of_8_billion_parameters_is_arithmetic() -> None:
    """Four of its 32 layers, as the others are like them."""
    fewer = ["--model.layers=4", "--train.global_batch_size=2"]
    job = load_job(CONFIG, overrides=[text.removeprefix("--") for text in fewer], with_data=False)
    plan = plan_of(job, 1)
    base, adapters, flops = arithmetic(plan)
    [rank] = plan.ranks
    assert rank.traffic is not None, rank.failure
    assert (plan.parameters, plan.trained) == (base + adapters, adapters)
    assert rank.weights == BF16 * base + FLOAT * adapters
    assert rank.gradients == FLOAT * adapters
    assert rank.optimizer == pytest.approx(2 * FLOAT * adapters, rel=1e-4)  # and a count of steps for each
    assert rank.traffic.flops == pytest.approx(flops, rel=1e-3)


def test_a_plan_shows_what_is_trained_and_no_share_of_flops_that_are_not_computed() -> None:
    from forge_plugin_plan.gpus import find_gpu
    from forge_plugin_plan.machine import Machine

    h100 = Machine.of_data_sheet(find_gpu("h100"), 1e9)

    texts = [report(plan_of(job_of(**CASES[name]), 1), h100) for name in ("adapters",)]
    texts += [report(plan_of(job_of(), 1), h100)]
    for text, is_shown in zip(texts, (True, False), strict=True):
        assert ("of them trained, bf16" in text) is is_shown
        assert ("as the model states them, were all of it trained" in text) is is_shown
        assert ("model FLOPs at" not in text) is is_shown
