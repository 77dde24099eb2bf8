"""`lion` against lion-pytorch, its cautious variant against the paper's update, through the engine and on layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import lion_pytorch
import pytest
import torch

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.optimizer import NamedParameter, NamedParameters
from forge_core.engine.trainer import Trainer
from forge_plugin_lion import Lion
from forge_plugin_lion import optimizer as implementation
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.laws import Case, layout_law
from forge_testing.refusals import naming

ROLES = {"embedding": (7, 4), "matrix": (5, 3), "norm": (4,), "bias": (4,), "head": (7, 4)}
BETAS = (0.8, 0.95)


def named(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return NamedParameters(
        [
            NamedParameter(role, torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)), role)
            for role, shape in ROLES.items()
        ]
    )


def set_gradients(parameters, step, missing=()):
    generator = torch.Generator().manual_seed(100 + step)
    for item in parameters:
        gradient = torch.randn(item.parameter.shape, generator=generator, dtype=item.parameter.dtype)
        item.parameter.grad = None if item.name in missing else gradient


def values(parameters):
    return {item.name: item.parameter.detach() for item in parameters}


@pytest.fixture(params=["in blocks", "whole"])
def small_blocks(request, monkeypatch):
    """Parameters of a CPU go in blocks; here in ones of three elements, or as on another device."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(implementation, "CPU_BLOCK", 3)
    if request.param == "whole":
        monkeypatch.setattr(implementation, "_batches", lambda parts: [list(parts)])


@pytest.mark.usefixtures("small_blocks")
def test_the_update_is_that_of_lion_pytorch():
    ours, theirs = named(), named()
    component = Lion(lr=0.01, betas=BETAS, weight_decay=0.2)
    decayed = (
        component.build(None, ours),
        lion_pytorch.Lion(
            [
                {"params": [item.parameter], "weight_decay": 0.2 if item.role in ("matrix", "head") else 0.0}
                for item in theirs
            ],
            lr=0.01,
            betas=BETAS,
        ),
    )
    for step in range(6):
        for parameters, optimizer in zip((ours, theirs), decayed, strict=True):
            set_gradients(parameters, step, missing=["norm"] if step in (0, 3) else [])
            optimizer.step()
    torch.testing.assert_close(values(ours), values(theirs), rtol=1e-14, atol=1e-14)


@pytest.mark.usefixtures("small_blocks")
def test_the_cautious_update_is_that_of_the_paper():
    parameters = named()
    optimizer = Lion(lr=0.01, betas=BETAS, weight_decay=0.2, cautious=True).build(None, parameters)
    expected = {item.name: item.parameter.detach().clone() for item in parameters}
    momenta = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    disagreed = 0
    for step in range(6):
        set_gradients(parameters, step)
        for item in parameters:
            weight, momentum, gradient = expected[item.name], momenta[item.name], item.parameter.grad
            update = torch.sign(BETAS[0] * momentum + (1 - BETAS[0]) * gradient)
            agrees = update * gradient > 0
            disagreed += int((~agrees).sum())
            if item.role in ("matrix", "head"):
                weight *= 1 - 0.01 * 0.2
            weight -= 0.01 * update * agrees * weight.numel() / (agrees.sum() + 1)
            momentum.mul_(BETAS[1]).add_(gradient, alpha=1 - BETAS[1])
        optimizer.step()
    torch.testing.assert_close(values(parameters), expected, rtol=1e-13, atol=1e-13)
    assert disagreed > 20


def test_an_element_without_a_gradient_waits_in_the_cautious_variant_only():
    for cautious, moved in ((False, True), (True, False)):
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = implementation.LionOptimizer([parameter], cautious=cautious)
        for gradient in ([1.0, 1.0], [1.0, 0.0]):
            parameter.grad = torch.tensor(gradient)
            before = parameter.detach().clone()
            optimizer.step()
        assert (parameter.detach() != before).tolist() == [True, moved]


def test_groups_may_have_settings_of_their_own():
    settings = [{"lr": 0.1, "betas": (0.0, 0.5), "weight_decay": 0.5}, {"cautious": True}]
    together, alone = named()[:2], named()[:2]
    groups = [{"params": [item.parameter], **keys} for item, keys in zip(together, settings, strict=True)]
    optimizers = [implementation.LionOptimizer(groups)] + [
        implementation.LionOptimizer([item.parameter], **keys) for item, keys in zip(alone, settings, strict=True)
    ]
    for step in range(4):
        set_gradients(together, step)
        set_gradients(alone, step)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(values(together), values(alone), rtol=0, atol=0)


@pytest.mark.parametrize("cautious", [False, True])
def test_tensors_that_are_not_contiguous_are_updated_alike(cautious):
    plain, strided = (torch.nn.Parameter(torch.arange(12.0).view(3, 4)) for _ in range(2))
    strided.data = strided.data.t().contiguous().t()
    gradient = torch.linspace(-1, 1, 12).view(3, 4)
    for parameter, own in ((plain, gradient), (strided, gradient.t().contiguous().t())):
        optimizer = implementation.LionOptimizer([parameter], lr=0.1, weight_decay=0.1, cautious=cautious)
        for _ in range(3):
            parameter.grad = own
            optimizer.step()
    torch.testing.assert_close(strided, plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("decay_embeddings", "decayed"), [(False, {"matrix", "head"}), (True, {"matrix", "head", "embedding"})]
)
def test_norms_biases_and_embeddings_are_spared_unless_asked(decay_embeddings, decayed):
    optimizer = Lion(decay_embeddings=decay_embeddings).build(None, named())
    found = {name for group in optimizer.param_groups if group["weight_decay"] for name in group["names"]}
    assert found == decayed
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(ROLES)


class FrozenAtFirst(TrainingHook):
    """Keeps the embedding frozen in the first two steps, and remembers what it is after each step."""

    def on_train_begin(self, context):
        self.seen = []
        context.model.embedding.weight.requires_grad_(False)

    def on_step_begin(self, context):
        context.model.embedding.weight.requires_grad_(context.step >= 3)

    def on_step_end(self, context):
        self.seen.append(context.model.embedding.weight.detach().clone())


def test_a_frozen_parameter_stays_and_trains_once_unfrozen(make_job, train):
    hook = FrozenAtFirst()
    train(make_job(steps=4, optimizer=Lion(lr=1e-2)), hook)
    stayed = [torch.equal(before, after) for before, after in pairwise(hook.seen)]
    assert stayed == [True, False, False]


# --- layouts --------------------------------------------------------------------------------------------------------


def curve_of(cautious):
    def curve(folder, changes):
        attention = GroupedQueryAttention(heads=4, kv_heads=2)
        model = Transformer(vocab_size=34, dim=16, layers=1, attention=attention)  # fsdp x tp shares 34 as 9, 8, 9, 8
        sources = (Numbers(held_out=4, ignored=3),)
        settings = {"steps": 5, "global_batch_size": 8, "seq_len": 16, "precision": "fp64", "model": model}
        settings |= {"optimizer": Lion(lr=3e-3, cautious=cautious), "data": {"sources": sources}, **changes}
        summary = Trainer(tiny_job(str(folder), **settings), echo=lambda text: None).run()
        records = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
        return [record[key] for record in records for key in ("loss", "grad_norm", "eval/loss") if key in record]

    return curve


def same_curve(ranks, alone):
    assert len(alone) == 11
    assert ranks[0] == pytest.approx(alone, rel=1e-9)


test_layouts = layout_law(
    Case("lion, cautious", observe=curve_of(cautious=True), compare=same_curve, layouts=("fsdp2", "tp2", "fsdp2_tp2")),
)


# --- the component --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        ({"lr": 0.0}, ["'lr'", "> 0", 0.0]),
        ({"betas": (0.9, 1.0)}, ["< 1", "[0.9, 1.0]"]),
        ({"weight_decay": -1.0}, ["'weight_decay'", ">= 0", -1.0]),
    ],
)
def test_values_out_of_range_are_refused(wrong, facts):
    with pytest.raises(ValueError, match=naming(*facts)):
        Lion(**wrong)


def test_importing_the_plugin_needs_no_torch():
    code = "import sys, forge_plugin_lion; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
