"""`u_mup` trains as the paper's own library does, has sizes of 1 at the start, and needs no base."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from test_mup_training import DENSE, job_of
from torch.nn import functional as F
from u_mup_reference import DECAY, DIM, EPSILON, HEADS, HIDDEN, LAYERS, LENGTH, RATE, RECORD, VOCAB, tokens, weights

from forge_core.contracts.components import ParameterGroup
from forge_plugin_adamw import AdamW
from forge_plugin_mup import MuP
from forge_plugin_mup.coordinates import activations
from forge_plugin_transformer import GELU, GroupedQueryAttention, NoRope, RMSNorm, SwiGLU, Transformer
from forge_testing import TinyModel, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Training
from forge_testing.refusals import at, check_problems, problems_of

PLUGIN = MuP(parametrization="u_mup")
MODEL = Transformer(
    vocab_size=VOCAB,
    dim=DIM,
    layers=LAYERS,
    norm=RMSNorm(eps=EPSILON),
    attention=GroupedQueryAttention(heads=HEADS, rope=NoRope()),
    ffn=SwiGLU(hidden=HIDDEN),
)


def absorbed(name: str) -> float:
    """Factors of the paper's forward pass, for a part of the model that has them all."""
    if name.startswith("embedding"):
        return 1.0
    if name.startswith("head"):
        return 1 / DIM
    scores = {"q": math.sqrt(1 / (DIM / HEADS))}
    # One over the size of what attention and SwiGLU compute
    share = 1 / (1 + 4 * DIM / HEADS)
    sizes = {"o": math.sqrt(math.log(LENGTH) / LENGTH) ** (1 - share), "down": 2**-0.75}
    key = name.split(".")[-2]
    writers = 1 / sizes[key] / math.sqrt(LAYERS) if key in sizes else 1.0
    return scores.get(key, 1.0) * writers / math.sqrt(HIDDEN if key == "down" else DIM)


def test_it_trains_as_the_library_of_the_paper(tmp_path: Path) -> None:
    frozen = (ParameterGroup(match="*norm.weight", lr=0.0),)
    keys = {"lr": RATE, "weight_decay": DECAY, "eps": EPSILON, "betas": (0.9, 0.95), "decay_embeddings": True}
    optimizer = AdamW(**keys, groups=frozen, fused=False)
    job = job_of(tmp_path, MODEL, optimizer, {"mup": PLUGIN}, seq_len=LENGTH)
    own, losses = weights(), []
    with Training.of(job) as training:
        model: Any = training.run.model
        for item in training.run.parameters:
            if item.name in own:
                item.parameter.data.copy_(own[item.name] * absorbed(item.name))
        for batch in tokens():
            logits = model.head.logits(model({"input_ids": batch}))
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
            training.run.optimizer.zero_grad()
            loss.backward()
            training.run.optimizer.step()
            losses.append(loss.item())
    assert losses == pytest.approx(json.loads(RECORD.read_text())["losses"], rel=1e-10)


def test_a_wide_and_deep_model_begins_as_a_small_one_without_a_base(tmp_path: Path) -> None:
    batch = {"input_ids": torch.randint(32, (8, 64), generator=torch.Generator().manual_seed(0))}
    sizes = []
    for width, layers in ((32, 2), (128, 8)):
        model = attrs.evolve(DENSE, dim=width, layers=layers, attention=GroupedQueryAttention(heads=width // 8))
        with Training.of(job_of(tmp_path, model, AdamW(), {"mup": PLUGIN}, seq_len=64)) as training:
            found = {item.name: item.parameter.std().item() for item in training.run.parameters}
            start = activations(training.run.model, batch)
        assert found["embedding.weight"] == pytest.approx(1, rel=0.05)
        assert found["layers.1.ffn.up.weight"] == pytest.approx(width**-0.5, rel=0.05)
        assert found["head.weight"] == pytest.approx(1 / width, rel=0.05)
        sizes.append(start["last layer"].square().mean().sqrt().item())
    # The root of 3 if parts added nothing in common: the embedding, all attention, and all feed-forward parts
    assert sizes == pytest.approx([3**0.5] * 2, rel=1)
    assert sizes[1] / sizes[0] == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        (TinyModel(), ("TinyNetwork", "unit_scales")),
        (attrs.evolve(DENSE, tie_embeddings=True), ("head.weight", "untie")),
        (attrs.evolve(DENSE, ffn=GELU(hidden=64)), ("ffn", "PlainFeedForward", "unit_scale")),
        (attrs.evolve(DENSE, attention=GroupedQueryAttention(heads=4, gate="head")), ("attention", "unit_scale")),
        (
            attrs.evolve(DENSE, attention=GroupedQueryAttention(heads=4, qk_norm=True, qk_norm_gain=False)),
            ("model.attention.scale = 0.125",),
        ),
    ],
    ids=["a stranger's", "tied", "another activation", "gates", "scores that nothing can absorb"],
)
def test_a_model_without_known_sizes_is_refused(tmp_path: Path, model: Any, facts: tuple[str, ...]) -> None:
    job = tiny_job(str(tmp_path), installed(), model=model, plugins={"mup": PLUGIN})
    check_problems(problems_of(job), at("plugins.mup.parametrization", *facts))


def test_scores_divided_by_the_width_need_no_factor(tmp_path: Path) -> None:
    keys = {"qk_norm": True, "qk_norm_gain": False, "scale": 0.125}
    model = attrs.evolve(DENSE, attention=GroupedQueryAttention(heads=4, **keys))
    check_problems(problems_of(tiny_job(str(tmp_path), installed(), model=model, plugins={"mup": PLUGIN})))
