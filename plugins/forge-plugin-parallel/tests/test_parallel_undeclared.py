"""Layers that mix positions beside attention: `cp` refuses those that do not say so, by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.contracts.contexts import BuildContext
from forge_core.engine.build import build_bare_model, build_context
from forge_core.plugins.catalog import Catalog
from forge_kit.nn.position_probe import ProbeFailed, undeclared_mixer
from forge_plugin_moe import ExpertChoice, MoE
from forge_plugin_parallel import ContextParallel
from forge_plugin_parallel.collectives import all_gather
from forge_plugin_transformer import (
    AttentionPattern,
    GroupedQueryAttention,
    MultiTokenPrediction,
    NoAttention,
    Transformer,
)
from forge_testing import Numbers, job_problems, tiny_job
from forge_testing.curves import Difference, train
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, problems_of

CP2 = {"cp": ContextParallel(degree=2)}


class ShortConvolution(nn.Module):
    """x plus a causal depthwise convolution over two positions (Canon layers). Shapes: x (B, S, D)."""

    def __init__(self, dim: int, context: BuildContext, *, gathers: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, dim))
        self.mixes_positions = gathers
        mesh = context.mesh if gathers and context.layout.cp > 1 else None
        self._group = None if mesh is None else mesh.get_group("cp")

    def init_parameter(self, name: str, fill: Any) -> None:
        fill.normal(0.5)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self._group is None:
            return self._mixed(x)
        places = all_gather(batch["places"], 1, self._group)[0]
        return self._mixed(all_gather(x, 1, self._group)[:, places.argsort()])[:, batch["places"][0]]

    def _mixed(self, x: Tensor) -> Tensor:
        return x + self.weight[0] * x + self.weight[1] * F.pad(x, (0, 0, 1, 0))[:, :-1]


@frozen(kw_only=True)
class WithConvolution(Transformer):
    """Its second layer begins with a convolution."""

    gathers: bool = False

    def build(self, context: BuildContext) -> Any:
        model: Any = super().build(context)
        layer = model.layers["1"]
        layer.canon, after = ShortConvolution(self.dim, context, gathers=self.gathers), layer.forward
        layer.forward = lambda carry, batch: after((layer.canon(carry[0], batch),), batch)
        return model


@frozen(kw_only=True)
class WithShift(Transformer):
    """One of its functions mixes positions: in a layer, in what comes before them, or after them."""

    where: str

    def build(self, context: BuildContext) -> Any:
        model: Any = super().build(context)
        holder = model if self.where in ("embed", "finish") else model.get_submodule(self.where)
        method = self.where if holder is model else "forward"
        before = getattr(holder, method)
        setattr(holder, method, lambda *args: self._shifted(before(*args)))
        return model

    def _shifted(self, value: Any) -> Any:
        return (value[0].cumsum(1),) if isinstance(value, tuple) else value + value.roll(5, 1)


def sizes(**keys: Any) -> dict[str, Any]:
    return {"vocab_size": 32, "dim": 16, "layers": 2, "attention": GroupedQueryAttention(heads=4, kv_heads=2), **keys}


def job(folder: Path, model: Any, stages: Any = CP2, **changes: Any) -> Any:
    settings = {"global_batch_size": 8, "precision": "fp64", "seq_len": 16, "steps": 3, **changes}
    return tiny_job(str(folder), data={"sources": (Numbers(held_out=5),)}, parallel=stages, model=model, **settings)


def test_a_convolution_beside_attention_is_refused_by_name(tmp_path: Path) -> None:
    problems = problems_of(job(tmp_path, WithConvolution(**sizes())), 2)
    check_problems(problems, at("parallel.cp", "layers.1.canon", "TransformerModel"))
    assert not job_problems(job(tmp_path, WithConvolution(**sizes()), {}), 1)


def test_a_block_that_declares_to_mix_nothing_and_does_is_refused_by_name(tmp_path: Path) -> None:
    """A layer without attention names no mixer, which is no mistake; a convolution in it is."""
    kinds = {"full": GroupedQueryAttention(heads=4, kv_heads=2), "none": NoAttention()}
    pattern = AttentionPattern(layers=("full", "none"), kinds=kinds)
    assert not job_problems(job(tmp_path, Transformer(**sizes(attention=pattern))), 2)
    problems = problems_of(job(tmp_path, WithConvolution(**sizes(attention=pattern))), 2)
    check_problems(problems, at("parallel.cp", "layers.1.canon", "TransformerModel"))


@pytest.mark.parametrize("where", ["embed", "finish", "layers.0", "layers.1.ffn_norm", "layers.1.attention.q"])
def test_functions_that_mix_positions_are_found(tmp_path: Path, where: str) -> None:
    problems = problems_of(job(tmp_path, WithShift(**sizes(), where=where)), 2)
    check_problems(problems, at("parallel.cp", where, "TransformerModel"))


def test_one_that_gathers_positions_itself_and_says_so_has_the_curve_of_one_process(tmp_path: Path) -> None:
    model = WithConvolution(**sizes(), gathers=True)
    assert not job_problems(job(tmp_path, model), 2)
    alone = train(job(tmp_path / "one", model, {}))

    def trained(rank: int) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*not checked")
            return train(job(tmp_path / "two", model))

    [found, _] = run_on_ranks(2, trained)
    assert Difference.between(found, alone).loss < 1e-12


def bare(folder: Path, model: Any, **changes: Any) -> Any:
    built = job(folder, model, {}, **changes)
    return build_bare_model(built, build_context(built, Catalog.installed(), None))[0]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        Transformer(**sizes(mtp=MultiTokenPrediction())),
        Transformer(**sizes(ffn=MoE(experts=4, hidden=8))),
        Transformer(**sizes(ffn=MoE(experts=4, hidden=8, capacity_factor=0.5))),
        Transformer(**sizes(ffn=MoE(experts=4, hidden=8, router=ExpertChoice()))),
    ],
    ids=["predictions", "experts", "capacity", "expert choice"],
)
def test_declared_mixers_pass_and_the_model_and_generators_stay_as_they_were(
    tmp_path: Path, model: Any, precision: str
) -> None:
    built = bare(tmp_path, model, precision=precision)
    parameters, state = dict(built.named_parameters()), torch.get_rng_state()
    attributes = {name: {**vars(module)} for name, module in built.named_modules()}
    assert undeclared_mixer(built) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter is parameters[name] for name, parameter in built.named_parameters())
    assert all(vars(module) == attributes[name] for name, module in built.named_modules())


def test_a_model_that_does_not_run_on_the_cpu_is_not_judged(tmp_path: Path) -> None:
    built = bare(tmp_path, Transformer(**sizes()))
    built.layers["0"].forward = lambda carry, batch: 1 / 0
    with pytest.raises(ProbeFailed, match="ZeroDivisionError"):
        undeclared_mixer(built)
