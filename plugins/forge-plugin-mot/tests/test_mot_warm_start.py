"""Weights of a modality start as copies of the text's, in a new run and under every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from forge_core.checkpoint.state import model_tensors
from forge_core.contracts.components import TrainingHook
from forge_core.engine.trainer import Trainer
from forge_plugin_checkpoints.parts import Parts
from forge_plugin_mot import MixtureOfTransformers
from forge_plugin_mot.warm_start import copy_text
from forge_plugin_vision import Joint
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks

MakeRows = Callable[..., Any]
COLD = MixtureOfTransformers(warm_start=False)


class Weights(TrainingHook):
    """Keeps the weights before the first step."""

    def on_train_begin(self, context: Any) -> None:
        self.first = {name: tensor.detach().clone() for name, tensor in model_tensors(context.model).items()}


def test_untied_equals_tied_at_a_warm_start(bare: Callable[..., Any], batch: dict[str, Tensor]) -> None:
    untied, tied = bare(MixtureOfTransformers(modalities=("image", "video"))), bare(Joint())
    expected = tied(batch)
    assert (untied(batch) - expected).abs().max() > 0.01
    copy_text(untied)
    torch.testing.assert_close(untied(batch), expected, atol=1e-12, rtol=0)


def first_weights(job: Any, train: Callable[..., Any]) -> dict[str, Tensor]:
    weights = Weights()
    train(job, weights)
    return weights.first


def names(weights: dict[str, Tensor]) -> dict[str, str]:
    return {name: name.replace(".modalities.image", "") for name in weights if ".modalities." in name}


def test_a_new_run_starts_from_its_own_initial_values(tiny_rows: MakeRows, train: Callable[..., Any]) -> None:
    first = first_weights(tiny_rows(MixtureOfTransformers(), steps=1), train)
    joint = first_weights(tiny_rows(Joint(), steps=1, job={"name": "joint"}), train)
    assert len(names(first)) == 2 * (4 + 2 + 3 + 2) + 1
    assert all(torch.equal(first[copy], joint[name]) for copy, name in names(first).items())


def test_a_new_run_starts_from_a_checkpoint_of_text(
    tiny_rows: MakeRows, language: Any, make_job: Callable[..., Any], train: Callable[..., Any]
) -> None:
    text = train(make_job(model=language, precision="fp64", job={"name": "text"}))
    load = {"load": Parts(path=str(text.folder), strict=False)}
    first = first_weights(tiny_rows(MixtureOfTransformers(), steps=1, checkpoint=load), train)
    initial = first_weights(tiny_rows(COLD, steps=1, job={"name": "cold"}), train)
    assert not torch.equal(first["layers.0.ffn.up.weight"], initial["layers.0.ffn.up.weight"])
    assert all(torch.equal(first[copy], first[name]) for copy, name in names(first).items())
    assert not any(
        torch.equal(initial[copy], initial[name]) for copy, name in names(first).items() if "norm" not in name
    )


def test_what_a_checkpoint_has_of_a_modality_is_kept(tiny_rows: MakeRows, train: Callable[..., Any]) -> None:
    before = train(tiny_rows(COLD, job={"name": "before"}))
    own = first_of(before.folder, tiny_rows, train, exclude=())
    assert not torch.equal(own["layers.0.ffn.modalities.image.up.weight"], own["layers.0.ffn.up.weight"])
    own = first_of(before.folder, tiny_rows, train, exclude=("*.attention.modalities.*",))
    assert not torch.equal(own["layers.0.ffn.modalities.image.up.weight"], own["layers.0.ffn.up.weight"])
    assert torch.equal(own["layers.0.attention.modalities.image.q.weight"], own["layers.0.attention.q.weight"])


def first_of(
    folder: Any, tiny_rows: MakeRows, train: Callable[..., Any], exclude: tuple[str, ...]
) -> dict[str, Tensor]:
    load = {"load": Parts(path=str(folder), exclude=exclude)}
    job = tiny_rows(MixtureOfTransformers(), steps=1, checkpoint=load, job={"name": f"after-{len(exclude)}"})
    return first_weights(job, train)


def test_a_continued_run_keeps_its_weights(tiny_rows: MakeRows, train: Callable[..., Any]) -> None:
    job = tiny_rows(MixtureOfTransformers(), steps=2)
    train(job)
    longer = attrs.evolve(job, train=attrs.evolve(job.train, steps=3))
    first = first_weights(longer, train)
    assert not any(torch.equal(first[copy], first[name]) for copy, name in names(first).items())


class FirstEvaluation(TrainingHook):
    """Keeps the loss of the evaluation before the first step."""

    def on_eval_end(self, context: Any, metrics: Any) -> None:
        if context.step == 0:
            self.loss = metrics["eval/loss"]


def loss_at_the_start(job: Any, catalog: Any) -> float:
    first = FirstEvaluation()
    Trainer(job, hooks=[first], catalog=catalog, echo=lambda text: None).run()
    return first.loss


def test_every_layout_starts_from_copies(tiny_rows: MakeRows, catalog: Any) -> None:
    jobs = []
    for name in ("fsdp2", "tp2", "pp2"):
        changes = {"parallel": LAYOUTS[name].stages(catalog), "job": {"name": name}, "eval": {"at_start": True}}
        jobs.append(tiny_rows(MixtureOfTransformers(), steps=1, global_batch_size=8, micro_batch_size=2, **changes))
    losses = run_on_ranks(2, lambda rank: [loss_at_the_start(job, catalog) for job in jobs])[0]
    joint = tiny_rows(Joint(), steps=1, job={"name": "joint"}, eval={"at_start": True})
    assert losses == pytest.approx([loss_at_the_start(joint, catalog)] * 3, abs=1e-12)
    cold = tiny_rows(COLD, steps=1, job={"name": "cold"}, eval={"at_start": True})
    assert abs(loss_at_the_start(cold, catalog) - losses[0]) > 1e-3
