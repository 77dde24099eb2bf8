"""`mixed.py`: the suite of models, its attention against quadratic forms, its FLOPs against counted ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from forge_core import Catalog
from forge_testing.refusals import lacks, refuses
from forge_testing.suites import ModelSuite

FILE = Path(__file__).with_name("mixed.py")
Mixed = Catalog.installed().load("model", f"{FILE}:Mixed")
mixed = sys.modules[Mixed.__module__]

MODEL = """
[model]
type = "PROOFS/mixed.py:Mixed"
blocks = ["window", "linear", "window"]
dim = 16
heads = 2
window = 3
vocab_size = 32
"""


class TestMixed(ModelSuite):
    component = Mixed(blocks=("linear", "window"), dim=16, heads=2, window=3, vocab_size=32)
    layouts = ("fsdp2", "pp2")


def attended(weights, v, document):
    """Σ weights v / Σ weights over what is seen, from all pairs of positions."""
    seen = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    weights = weights * seen
    return (weights @ v) / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_linear_attention_is_its_quadratic_form(chunk, monkeypatch):
    monkeypatch.setattr(mixed.LinearAttention, "chunk", chunk)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 11, 4, dtype=torch.float64).requires_grad_().unbind()
    document = torch.tensor([[0] * 11, [0] * 4 + [1] * 3 + [2] * 4])
    feature = lambda x: torch.nn.functional.elu(x) + 1  # noqa: E731
    expected = attended(feature(q) @ feature(k).mT, v, document)
    found = mixed.LinearAttention()(q, k, v, document)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    both = [torch.autograd.grad((y * weights).sum(), (q, k, v), retain_graph=True) for y in (found, expected)]
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-12)


def test_a_window_sees_the_nearest_positions_only():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64).unbind()
    document = torch.tensor([[0] * 5 + [1] * 4])
    band = torch.ones(9, 9).triu(-2)
    expected = attended((q @ k.mT / 2).exp() * band, v, document)
    torch.testing.assert_close(mixed.SlidingWindow(3)(q, k, v, document), expected, rtol=1e-12, atol=1e-12)


def test_its_flops_are_those_that_are_counted(job_of, build):
    """Products with weights by torch's counter, pairs of positions one by one."""
    model = build(job_of("flops", MODEL)).model
    batch = {"input_ids": torch.arange(64).view(2, 32) % 32}
    with FlopCounterMode(display=False) as counter:
        model.head.logits(model(batch)).sum().backward()
    weights = counter.get_flop_counts()["Global"][torch.ops.aten.mm] / batch["input_ids"].numel()
    pairs = torch.ones(32, 32).tril().triu(-2).sum().item() / 32
    window, linear = 12 * 16 * pairs, 12 * 2 * 8 * 8
    assert model.flops(32) == pytest.approx(weights + 2 * window + linear)


def test_the_plan_and_the_utilisation_are_made_of_its_flops(job_of, train, run_folder, build, capsys):
    job = job_of("run", MODEL + "[metrics]\npeak_tflops = 1e-3\n")
    train(job, echo=print)
    flops = build(job).model.flops(8)
    assert not lacks(capsys.readouterr().out, "32 tokens", "1 x 4 sequences of 8", f"{flops * 32:.3g} FLOPs")
    lines = map(json.loads, (run_folder("run") / "metrics.jsonl").read_text().splitlines())
    seen = [(line["mfu"], line["tokens_per_second"]) for line in lines if "mfu" in line]
    assert seen
    assert all(mfu == pytest.approx(flops * speed / 1e9, rel=1e-6) for mfu, speed in seen)


def test_a_stage_that_it_has_no_protocol_for_is_refused(job_of):
    with refuses("parallel.tp", "Network"):
        job_of("tp", MODEL + "[parallel.tp]\ndegree = 2\n", ranks=2)
