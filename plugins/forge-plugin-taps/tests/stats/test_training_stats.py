"""Norms of `training_stats`, beside torch's of the whole tensors, and under layouts."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from attrs import define, evolve
from stats_jobs import MODEL, job, lines, stats

from forge_core import ForgeError, TrainingHook
from forge_core.contracts.errors import NonFiniteError
from forge_plugin_losses import ChunkedCrossEntropy
from forge_plugin_moe import MoE
from forge_plugin_taps.stats import Limit, NoiseScale
from forge_testing.catalogs import installed
from forge_testing.laws import Case, layout_law
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.suites import HookSuite

ATTENTION = [f"attention.{name}.weight" for name in ("q", "k", "v", "o")]
FEED_FORWARD = [f"ffn.{name}.weight" for name in ("gate", "up", "down")]
NORMS = [f"{name}.weight" for name in ("attention_norm", "ffn_norm", "attention.q_norm", "attention.k_norm")]
WITHIN = {
    "role": {"matrix": [*ATTENTION, *FEED_FORWARD], "norm": NORMS},
    "parameter": {name: [name] for name in (*ATTENTION, *FEED_FORWARD, *NORMS)},
}
"""Parameters of a layer by group."""


@define(kw_only=True, slots=False)
class Tensors(TrainingHook):
    """Keeps what the numbers of the last step are made of."""

    def on_step_begin(self, context):
        with torch.no_grad():
            hidden = [context.model(context.model.prepare(batch)) for batch in context.batches]
            self.logits = torch.cat([context.model.head(each) for each in hidden])

    def on_gradients(self, context):
        named = dict(context.model.named_parameters())
        self.gradients = {name: each.grad.clone() for name, each in named.items()}
        self.weights = {name: each.detach().clone() for name, each in named.items()}

    def on_step_end(self, context):
        named = context.model.named_parameters()
        self.updates = {name: each.detach() - self.weights[name] for name, each in named}


class TestTrainingStats(HookSuite):
    component = stats(limits=(Limit(metric="grad_norm", above=1e9),))


@pytest.mark.parametrize("by", ["role", "parameter"])
def test_norms_are_those_of_whole_tensors(tmp_path, by):
    tensors = Tensors()
    found = lines(job(tmp_path, stats(by=by)), tensors)
    assert not found[1]
    assert not found[3]
    groups = {f"layers.{n}/{k}": [f"layers.{n}.{m}" for m in v] for n in range(2) for k, v in WITHIN[by].items()}
    for name in ("embedding", "head", "norm"):
        groups[f"{name}/{name if by == 'role' else 'weight'}"] = [f"{name}.weight"]
    groups["model"] = list(tensors.weights)
    logits = tensors.logits
    expected = {"stats/logits/max": logits.abs().max().item(), "stats/logits/rms": logits.square().mean().sqrt().item()}
    for group, names in groups.items():
        of = {
            kind: torch.cat([getattr(tensors, f"{kind}s")[name].flatten() for name in names]).norm().item()
            for kind in ("weight", "gradient", "update")
        }
        expected |= {f"stats/{kind}_norm/{group}": value for kind, value in of.items()}
        expected[f"stats/update_ratio/{group}"] = of["update"] / of["weight"]
    assert min(expected.values()) > 0
    assert found[4] == pytest.approx(expected, rel=1e-13)


def test_without_updates_no_weights_are_copied(tmp_path):
    hook = stats(updates=False, logits=False)
    found = lines(job(tmp_path, hook, steps=2))[2]
    assert {name.split("/")[1] for name in found} == {"weight_norm", "gradient_norm"}
    assert not hook._before


def test_peaks_of_memory_are_read_at_the_ends_of_phases_and_not_reset(tmp_path, monkeypatch):
    asked = []

    def fake(device, function):
        asked.append(function)
        return {"allocated_bytes.all.peak": 1e9 * len(asked)}

    monkeypatch.setattr("forge_plugin_taps.stats.step_probe.query_device", fake)
    found = lines(job(tmp_path, stats(), steps=2))
    # At the beginning of the step, whether there are any; then at the end of each phase
    assert {name: value for name, value in found[2].items() if "memory" in name} == {
        "stats/memory/forward_gb": 2.0,
        "stats/memory/backward_gb": 3.0,
        "stats/memory/optimizer_gb": 4.0,
    }
    assert asked == ["memory_stats"] * 4


def test_the_model_has_its_methods_back_after_a_step_that_fails(tmp_path):
    class Broken(TrainingHook):
        def on_step_begin(self, context):
            self.model = context.model
            assert "finish" in vars(context.model)
            raise RuntimeError("broken")

    hook = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        lines(job(tmp_path, stats(interval=1)), hook)
    assert "finish" not in vars(hook.model)
    assert "whole" not in vars(hook.model.head)


def observed(model, **settings):
    def observe(folder, layout):
        plugins = {"noise_scale": NoiseScale(interval=2)}
        changes = {"model": model, "loss": ChunkedCrossEntropy(chunk_tokens=16), "plugins": plugins, **layout}
        found = lines(job(folder, stats(**settings), installed(), steps=2, **changes))
        return found[2] if not dist.is_initialized() or dist.get_rank() == 0 else None

    return observe


def the_same(ranks, alone):
    assert ranks[0] == pytest.approx(alone, rel=1e-9, abs=1e-12)
    assert min(value for name, value in alone.items() if "noise" not in name and "square" not in name) > 0


TIED = evolve(MODEL, tie_embeddings=True)
ROUTED = evolve(MODEL, ffn=MoE(experts=4, hidden=8))
test_layouts = layout_law(
    Case("stats", observe=observed(MODEL), compare=the_same, layouts=("replicate2", "fsdp2", "tp2", "pp2", "cp2")),
    # The embedding is on both ranks of the pipeline, and counts once
    Case("tied", observe=observed(TIED, by="part"), compare=the_same, layouts=("pp2",)),
    Case("experts", observe=observed(ROUTED, by="parameter"), compare=the_same, layouts=("fsdp2_ep2",)),
)


def test_a_limit_warns_with_the_step_the_number_and_the_bound(tmp_path):
    limits = (Limit(metric="stats/update_ratio/layers.*", above=1e-6), Limit(metric="loss", below=0.0))
    with pytest.warns(UserWarning, match=r"step 2: stats/update_ratio/layers\.0/matrix is .*, above 1e-06") as caught:
        lines(job(tmp_path, stats(limits=limits), steps=3))
    assert len([each for each in caught if "training_stats" in str(each.message)]) == 1


def test_a_limit_that_stops_saves_and_ends_the_run_with_its_words(tmp_path):
    limits = (Limit(metric="stats/weight_norm/model", above=1.0, action="stop"),)
    made = job(tmp_path, stats(limits=limits), steps=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NonFiniteError, match=r"step 2: stats/weight_norm/model is .*, above 1 \(limits\.0\)"):
            lines(made)
    assert [each.name for each in (tmp_path / "run/checkpoints").iterdir() if each.is_dir()] == ["step-3"]


def test_a_limit_of_nothing_is_refused(tmp_path):
    with pytest.raises(ForgeError, match=r"limits\.0\.metric 'stats/update_rate/\*' matches no number of step 2"):
        lines(job(tmp_path, stats(limits=(Limit(metric="stats/update_rate/*", above=1.0),))))


def test_jobs_that_would_log_or_watch_nothing_are_refused(tmp_path):
    limits = (Limit(metric="loss"), Limit(metric="loss", above=1.0, below=2.0))
    check_problems(
        problems_of(job(tmp_path, stats(interval=5, limits=limits))),
        at("hooks.training_stats.interval", "train.steps 4", "5"),
        at("hooks.training_stats.limits.0.above", "is missing"),
        at("hooks.training_stats.limits.1.below", "larger than above = 1"),
    )
