"""`qk_clip`: scores of heads above the threshold are brought back to it, by the weights, under every layout."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from attrs import define, evolve

from forge_core.auxiliary import Count
from forge_core.config.rules import check_rules
from forge_core.contracts.components import TrainingHook
from forge_core.engine.trainer import Trainer
from forge_core.parallel.mesh import global_rank
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_muon import Muon, QKClip
from forge_plugin_muon.qk_clip import Clip
from forge_plugin_parallel import ContextParallel
from forge_plugin_schedule_free import ScheduleFreeAdamW
from forge_plugin_text.packing import Isolate
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import TinyModel, tiny_job
from forge_testing.catalogs import installed
from forge_testing.documents import RandomDocuments
from forge_testing.laws import Case, layout_law
from forge_testing.outcomes import metrics_of
from forge_testing.refusals import at, check_problems
from forge_testing.runs import tiny_run, whole_tensors
from forge_testing.suites import HookSuite

GQA = GroupedQueryAttention(heads=4, kv_heads=2, bias=True, window=6)
LATENT = MultiHeadLatentAttention(
    heads=2, q_lora_rank=6, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=4
)
SIZES = {"seq_len": 16, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp64", "gc_interval": 0}
THRESHOLD = 1e-3
"""Below what initial weights give, so that heads are clipped in each step."""


def lines_of(summary):
    return [line for line in metrics_of(summary) if "loss" in line]


def model_of(attention, **changes):
    return Transformer(**{"dim": 16, "layers": 2, "vocab_size": 32, "attention": attention} | changes)


def job_of(folder, attention, clip=None, **changes):
    plugins = {"clip": QKClip(threshold=THRESHOLD, alpha=0.25) if clip is None else clip}
    settings = {"optimizer": Muon(lr=0.05), "model": model_of(attention), "steps": 3, **SIZES}
    settings |= {"plugins": plugins, "hooks": {"kept": Kept()}}
    return tiny_job(str(folder), installed(), **settings | changes)


@define(kw_only=True, slots=False)
class Kept(TrainingHook):
    """Keeps weights before and after the hooks of each step, what the attention cores received, and the batches."""

    def on_train_begin(self, context):
        self.steps, self._seen = [], {}
        for key, layer in context.model.layers.items():
            layer.attention.core.register_forward_pre_hook(
                lambda core, args, key=key: self._seen.setdefault(key, []).append((core, *args)) and None
            )

    def on_step_end(self, context):
        self.steps.append((self._seen.copy(), {n: p.detach().clone() for n, p in context.model.named_parameters()}))
        self._seen.clear()

    def on_train_end(self, context):
        self.weights = whole_tensors(dict(context.model.named_parameters()), context.build.mesh)


def expected_peaks(calls):
    """The largest score of each head, by the matrix of all pairs of positions of each row."""
    peaks = []
    for core, q, k, _, batch in calls:
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        scores = torch.einsum("bqhe,bkhe->hbqk", q, k) * (core.scoring.scale or 1 / math.sqrt(q.shape[-1]))
        for row in range(len(q)):
            for i in range(q.shape[1]):
                for j in range(q.shape[1]):
                    ids = batch["document_ids"][row] if "document_ids" in batch else torch.zeros(q.shape[1])
                    seen = j <= i and not (core.scoring.window and i - j >= core.scoring.window)
                    if not seen or len(set(ids[j : i + 1].tolist())) > 1:
                        scores[:, row, i, j] = -math.inf
        peaks.append(scores.amax((1, 2, 3)))
    return torch.stack(peaks).amax(0).detach()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("attention", [GQA, LATENT], ids=["gqa", "mla"])
def test_weights_are_scaled_as_the_paper_has_it(tmp_path, attention, packed):
    """Against the equations, from the scores of all pairs; twice the run, once with nothing above the threshold."""
    data = {"sources": (RandomDocuments(),), "packing": Isolate()} if packed else {}
    jobs = {
        name: job_of(tmp_path / name, attention, QKClip(threshold=threshold, alpha=0.25), steps=1, data=data)
        for name, threshold in {"clipped": THRESHOLD, "free": 1e9}.items()
    }
    summaries = {name: Trainer(job, echo=len).run() for name, job in jobs.items()}
    (seen, free), (_, clipped) = jobs["free"].hooks["kept"].steps[0], jobs["clipped"].hooks["kept"].steps[0]
    all_peaks = []
    for layer, calls in seen.items():
        peaks = expected_peaks(calls)
        all_peaks.append(peaks)
        at = f"layers.{layer}.attention"
        if attention is GQA:
            factors = (THRESHOLD / peaks.unflatten(0, (2, 2)).amax(1)).clamp(max=1)
            expected = {f"{at}.q.{kind}": (factors**0.25).repeat_interleave(8) for kind in ("weight", "bias")}
            expected |= {f"{at}.k.{kind}": (factors**0.75).repeat_interleave(4) for kind in ("weight", "bias")}
        else:
            factors = (THRESHOLD / peaks).clamp(max=1)[:, None]
            queries = torch.cat([(factors**0.25).expand(-1, 6), factors.expand(-1, 4)], 1)
            keys = torch.cat([(factors**0.75).expand(-1, 6), torch.ones(2, 4)], 1)
            expected = {f"{at}.q_up.weight": queries.flatten(), f"{at}.kv_up.weight": keys.flatten()}
        for name, rows in expected.items():
            rows = rows if free[name].ndim == 1 else rows[:, None]
            torch.testing.assert_close(clipped.pop(name), free[name] * rows, rtol=1e-12, atol=1e-15, msg=name)
    for name, weight in clipped.items():
        assert torch.equal(weight, free[name]), name
    [line] = lines_of(summaries["clipped"])
    assert line["attention/max_logit"] == pytest.approx(torch.cat(all_peaks).amax().item(), rel=1e-6)
    assert line["attention/clipped_heads"] == (torch.cat(all_peaks) > THRESHOLD).sum()


def observe(attention, **model):
    def curve(folder, changes):
        job = job_of(folder, attention, model=model_of(attention, **model), **changes)
        summary = Trainer(job, echo=len).run()
        heads = [line["attention/clipped_heads"] for line in lines_of(summary)] if global_rank() == 0 else []
        return job.hooks["kept"].weights, heads

    return curve


def same_weights(ranks, alone):
    expected, heads = alone
    assert min(heads) > 0, "nothing was clipped"
    for weights, _ in ranks:
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-11, msg=name)


test_layouts = layout_law(
    Case("gqa", observe=observe(evolve(GQA, gate=True)), compare=same_weights, layouts=("fsdp2", "tp2", "pp2")),
    Case("mla", observe=observe(LATENT), compare=same_weights, layouts=("fsdp2", "tp2")),
    Case("traced", observe=observe(GQA), compare=same_weights, layouts=("traced",)),
)


class TestQKClip(HookSuite):
    """The kind's contract, with clipping in each step."""

    component = QKClip(threshold=THRESHOLD)
    changes_training = True

    def tiny_job(self, folder, **changes):
        return super().tiny_job(folder, **{"model": model_of(GQA)} | changes)


REFUSED = {
    "cp": ({"parallel": {"cp": ContextParallel(degree=2)}}, 2, ("cp", 2)),
    "weights for evaluation": ({"optimizer": ScheduleFreeAdamW()}, 1, ("ScheduleFreeAdamW",)),
}


@pytest.mark.parametrize(("changes", "ranks", "facts"), REFUSED.values(), ids=REFUSED)
def test_a_job_in_which_it_cannot_work_is_refused_when_it_is_checked(tmp_path, changes, ranks, facts):
    check_problems(check_rules(job_of(tmp_path, GQA, **changes), installed(), ranks), at("plugins.clip", *facts))


MODELS = {
    "norms": (model_of(evolve(GQA, qk_norm=True)), ("GroupedAttention", "layer 0")),
    "shared keys": (model_of(GroupedQueryAttention(heads=4), kv_shared_layers=1), ("GroupedAttention", "layer 0")),
    "no attention": (TinyModel(), ("no attention",)),
}


@pytest.mark.parametrize(("model", "facts"), MODELS.values(), ids=MODELS)
def test_a_model_whose_attention_it_cannot_clip_is_refused_when_the_job_is_checked(tmp_path, model, facts):
    check_problems(check_rules(job_of(tmp_path, GQA, model=model), installed(), 1), at("plugins.clip", *facts))


def test_a_step_without_an_update_changes_no_weights_nor_do_scores_that_are_infinite(tmp_path):
    run = tiny_run(tmp_path, model=model_of(GQA), **SIZES)
    clip, context = (
        Clip(threshold=2.0, alpha=0.5, path=""),
        SimpleNamespace(model=run.model, build=run.context, skipped=True),
    )
    clip.on_train_begin(context)
    before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    scores = torch.tensor([math.inf, 4.0, 1.0, -math.inf], dtype=torch.float64)
    run.context.auxiliary.end_step({Count("attention/max_logit", layer): scores for layer in range(2)})
    clip.on_step_end(context)
    assert all(torch.equal(weight, before[name]) for name, weight in run.model.named_parameters())
    context.skipped = False
    clip.on_step_end(context)
    changed = {name for name, weight in run.model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {f"layers.{layer}.attention.{part}.weight" for layer in range(2) for part in "qk"}
    key = "layers.0.attention.k.weight"
    ratio = run.model.get_parameter(key) / before[key]
    torch.testing.assert_close(ratio[:4], torch.full_like(ratio[:4], math.sqrt(0.5)))
    torch.testing.assert_close(ratio[4:], torch.ones_like(ratio[4:]))
