"""`mup` trains as the papers' tables do, whose factors are in the forward pass; and under every layout alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from forge_core.contracts.components import ParameterGroup
from forge_plugin_adamw import AdamW
from forge_plugin_moe import MoE, SoftmaxTopK
from forge_plugin_mup import MuP
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_testing import Numbers, curves, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, Training, same_curve
from forge_testing.laws import Case, layout_law

WIDTH, DEPTH = 4, 2
"""Of the model, relative to the base."""
DENSE = Transformer(
    vocab_size=32, dim=32, layers=4, attention=GroupedQueryAttention(heads=4), ffn=SwiGLU(hidden=64), init_std=0.1
)
BASE = {"dim": 8, "layers": 2, "attention": {"heads": 1}, "ffn": {"hidden": 16}}
RATE, DECAY = 1e-2, 0.1


def job_of(folder: Path, model: Any, optimizer: Any, plugins: Any, **settings: Any) -> Any:
    wanted: dict[str, Any] = {"steps": 6, "precision": "fp64", "global_batch_size": 8, "seq_len": 16}
    # Clipping is by the norm of the parameters as they are, which absorbed factors change
    wanted["grad_clip_norm"] = 0.0
    data = {"sources": (Numbers(ignored=3),)}
    keys = {"model": model, "optimizer": optimizer, "plugins": plugins, "data": data, **wanted, **settings}
    return tiny_job(str(folder), installed(), **keys)


def table(depth: int, epsilon: float) -> tuple[ParameterGroup, ...]:
    """Table 1 of Dey et al. with alpha = 1, as its authors have it: for factors in the forward pass."""
    inside = {"eps": epsilon / (WIDTH * depth)}
    hidden = ParameterGroup(match="layers.*.*.?*.weight", lr=RATE / WIDTH, weight_decay=DECAY * WIDTH, settings=inside)
    norms = ParameterGroup(match="layers.*norm.weight", settings=inside)
    ends = ParameterGroup(match="*", settings={"eps": epsilon / WIDTH})
    return norms, hidden, ends


WIDER_HEADS = {"attention": GroupedQueryAttention(heads=1)}
MODELS: Mapping[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    # Keys of the model, keys of the reference, and the parameters that write into the residual stream
    "heads": ({}, {}, ["attention.o.weight", "ffn.down.weight"]),
    "wider heads": (
        WIDER_HEADS,
        {"attention": GroupedQueryAttention(heads=1, scale=8**-0.5 / WIDTH)},
        ["attention.o.weight", "ffn.down.weight"],
    ),
    "norms behind the parts": (
        {"norm_placement": "both"},
        {},
        ["attention_post_norm.weight", "ffn_post_norm.weight"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_with_the_factors_of_complete_p_in_the_forward_pass(tmp_path: Path, name: str) -> None:
    """The reference has them as keys of the model and as groups; epsilon is as large as gradients, so that it acts."""
    keys, reference_keys, writers = MODELS[name]
    model, epsilon = attrs.evolve(DENSE, **keys), 1e-3
    optimizer = AdamW(lr=RATE, weight_decay=DECAY, eps=epsilon, fused=False)
    found = curves.train(job_of(tmp_path, model, optimizer, {"mup": MuP(base=BASE)}))

    scaled = attrs.evolve(model, residual_scale=1 / DEPTH, logit_scale=1 / WIDTH, **reference_keys)
    by_paper = attrs.evolve(optimizer, groups=table(DEPTH, epsilon))
    expected = from_values(job_of(tmp_path, scaled, by_paper, {}), found.initial, writers)
    assert expected == pytest.approx(found.losses, rel=1e-10)
    assert found.losses[0] - found.losses[-1] > 0.1


def from_values(job: Any, initial: Mapping[str, torch.Tensor], writers: list[str]) -> list[float]:
    """The losses of a job from the initial values of another, where these have not absorbed what this one computes."""
    with Training.of(job) as training, torch.no_grad():
        for item in training.run.parameters:
            factor = WIDTH if item.role == "head" else DEPTH if item.name.endswith(tuple(writers)) else 1
            # Queries had absorbed the factor on scores: sqrt(8) / 32 in place of 1 / sqrt(32)
            if job.model.attention.scale and item.name.endswith("q.weight"):
                factor = WIDTH**0.5
            item.parameter.copy_(initial[item.name] * factor)
        with torch.enable_grad():
            return training.curve(job.train.steps).losses


def test_initial_values_are_those_of_the_base_by_the_root_of_the_width(tmp_path: Path) -> None:
    """And those of writers are 1 / depth as large; a base of depth 2 has drawn them with init_std / sqrt(4)."""
    with Training.of(job_of(tmp_path, DENSE, AdamW(), {"mup": MuP(base=BASE)})) as training:
        found = {item.name: item.parameter.std().item() for item in training.run.parameters}
    expected = {
        "embedding.weight": 0.1,
        "layers.1.attention.q.weight": 0.1 / WIDTH**0.5,
        "layers.3.ffn.up.weight": 0.1 / WIDTH**0.5,
        "layers.3.ffn.down.weight": 0.1 / 4**0.5 / WIDTH**0.5 / DEPTH,
        "head.weight": 0.1 / WIDTH,
    }
    for name, std in expected.items():
        assert found[name] == pytest.approx(std, rel=0.1), name


def test_epsilon_follows_the_gradients(tmp_path: Path) -> None:
    """Gradients of a wide and deep model are smaller; divided by the factor on epsilon, they are those of the base."""
    keys = {"layers": 2, "attention": GroupedQueryAttention(heads=1), "ffn": SwiGLU(hidden=16)}
    base = attrs.evolve(DENSE, dim=8, **keys)
    wide = attrs.evolve(DENSE, dim=64, layers=16, attention=GroupedQueryAttention(heads=8), ffn=SwiGLU(hidden=128))
    small, large = (
        first_gradients(job_of(tmp_path, model, AdamW(eps=1.0), {"mup": MuP(base=BASE)})) for model in (base, wide)
    )
    for name in small:
        assert 0.4 < large[name] / small[name] < 2.5, name


def first_gradients(job: Any) -> dict[str, float]:
    """Root mean squares of the gradients of parameters that the base has, relative to epsilon."""
    with Training.of(job) as training:
        gradients = training.curve(1).gradients
        epsilon = {name: group["eps"] for group in training.run.optimizer.param_groups for name in group["names"]}
    # Of all layers, as the first of few is not the first of many
    found: dict[str, list[float]] = {}
    for name, gradient in gradients.items():
        below = name.split(".", 2)[2] if name.startswith("layers.") else name
        found.setdefault(below, []).append(gradient.square().mean().sqrt().item() / epsilon[name])
    return {name: sum(values) / len(values) for name, values in found.items()}


def test_tables_of_groups_are_of_the_base(tmp_path: Path) -> None:
    """Three times the base's settings in a table are three times the settings here, whatever factors they have."""
    optimizer = AdamW(lr=RATE, weight_decay=DECAY, eps=1e-8)
    three = {"lr": 3 * RATE, "settings": {"eps": 3e-8}}
    tables = (
        ParameterGroup(match="embedding.*", **three),
        # No norm, bias or embedding: these have no decay of which three times could be taken
        ParameterGroup(match="head.*", weight_decay=3 * DECAY, **three),
        ParameterGroup(match="layers.3.*.down.*", weight_decay=3 * DECAY, **three),
    )
    # Both the sizes and the batch, four times the base's, put factors on them
    plugins = {"mup": MuP(base=BASE, base_batch_tokens=32)}
    plain = settings(job_of(tmp_path, DENSE, optimizer, plugins))
    found = settings(job_of(tmp_path, DENSE, attrs.evolve(optimizer, groups=tables), plugins))
    named = {name for name in plain if name.startswith(("embedding.", "head.", "layers.3.ffn.down."))}
    assert len(named) == 3
    for name, values in plain.items():
        factor = 3 if name in named else 1
        assert found[name] == pytest.approx([factor * value for value in values], rel=1e-12), name
    assert found["head.weight"][0] == pytest.approx(3 * RATE * 2 / WIDTH)  # 2 is the root of the batch


def settings(job: Any) -> dict[str, list[float]]:
    """Rate, decay and epsilon of each parameter."""
    with Training.of(job) as training:
        groups = training.run.optimizer.param_groups
        keys = ("lr", "weight_decay", "eps")
        return {name: [group[key] for key in keys] for group in groups for name in group["names"]}


EXPERTS = attrs.evolve(DENSE, ffn=MoE(experts=4, hidden=16, router=SoftmaxTopK(top_k=2), shared_experts=1))
JOBS: Mapping[str, tuple[Any, MuP]] = {
    "dense": (DENSE, MuP(base=BASE)),
    "experts": (EXPERTS, MuP(base={"dim": 8, "layers": 2, "attention": {"heads": 1}, "ffn": {"hidden": 4}})),
    "u_mup": (DENSE, MuP(parametrization="u_mup")),
}


def observation(name: str) -> Callable[[Path, Mapping[str, Any]], Curve]:
    def observe(folder: Path, changes: Mapping[str, Any]) -> Curve:
        model, plugin = JOBS[name]
        optimizer = AdamW(lr=RATE, eps=1e-3, fused=False)
        return curves.train(job_of(folder, model, optimizer, {"mup": plugin}, **changes))

    return observe


LAYOUTS = {"dense": ("fsdp2", "tp2", "pp2"), "experts": ("fsdp2_ep2", "tp2"), "u_mup": ("tp2", "pp2")}
test_layouts = layout_law(
    *(Case(name, observe=observation(name), compare=same_curve, layouts=LAYOUTS[name]) for name in JOBS)
)
