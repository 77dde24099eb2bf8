"""Stage `float8` in whole runs: which layers it changes, in which layouts, what it keeps, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar
from unittest import mock

import attrs
import pytest
import torch
from attrs import frozen
from torch import nn
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.layout import Layout
from forge_core.engine.build import build_context, build_run
from forge_core.engine.reporting import describe_run
from forge_core.engine.step import Stepper
from forge_core.engine.trainer import Trainer
from forge_core.parallel.stages import order_stages
from forge_core.plugins.catalog import Catalog
from forge_kit.nn.modules import Linear
from forge_plugin_compile import Compile
from forge_plugin_lowbit.float8 import Float8
from forge_plugin_lowbit.float8.choice import short
from forge_plugin_lowbit.float8.stage import multiplies_float8
from forge_plugin_parallel import FSDP, ActivationCheckpointing, ContextParallel, PipelineParallel, TensorParallel
from forge_plugin_parallel.pp import splits_backward
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_testing import Numbers, TinyModel, tiny_job
from forge_testing.catalogs import with_components
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, lacks, problems_of, refuses
from forge_testing.tiny_model import TinyNetwork

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
FSDP2 = {"fsdp": FSDP()}
TP2 = {"tp": TensorParallel(degree=2)}
ROUNDING = 1e-6
"""Relative, of losses and norms of a first step."""
FLIPS = 0.02
"""Later on: where a value lies between two of float8, the last bit of float32 decides."""


def transformer(**keys):
    settings = {"vocab_size": 32, "dim": 32, "layers": 2, "attention": GroupedQueryAttention(heads=4, kv_heads=4)}
    return Transformer(**{**settings, "ffn": SwiGLU(hidden=64), **keys})


def job(folder, parallel, steps=3, **changes):
    settings = {"model": transformer(), "global_batch_size": 8, "micro_batch_size": 4, "seq_len": 16}
    settings |= {"precision": "fp32", "data": {"sources": (Numbers(held_out=5),)}, "eval": {"interval": 1}}
    return tiny_job(str(folder), Catalog.installed(), steps=steps, parallel=parallel, **(settings | changes))


def train(*arguments, **changes):
    return Trainer(job(*arguments, **changes), echo=lambda text: None).run() and None


def built(folder, parallel, **changes):
    wanted = job(folder, parallel, **changes)
    return build_run(wanted, build_context(wanted, Catalog.installed(), None))


def curve(folder):
    """Losses, gradient norms and held-out losses, in order."""
    lines = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "grad_norm", "eval/loss") if key in line]


def close(found, expected):
    """The first step to rounding; later ones as far as values that round the other way take them."""
    return found[:2] == pytest.approx(expected[:2], rel=ROUNDING) and found == pytest.approx(expected, rel=FLIPS)


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Before processes are forked, so that each does not import torchao again."""
    import forge_plugin_lowbit.float8.stage  # noqa: F401


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The curve of one process, by recipe; without: not in float8."""
    found = {}

    def run(recipe=None):
        if recipe not in found:
            folder = tmp_path_factory.mktemp("alone")
            train(folder, {"float8": Float8(recipe=recipe)} if recipe else {})
            found[recipe] = curve(folder)
        return found[recipe]

    return run


# --- layouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_changes_the_curve_a_little(alone, recipe):
    difference = abs(alone(recipe)[0] / alone()[0] - 1)
    assert 1e-6 < difference < 1e-3


def observation(recipe):
    def observe(folder, changes):
        train(folder, **{**changes, "parallel": {"float8": Float8(recipe=recipe), **changes.get("parallel", {})}})
        return curve(folder)

    return observe


def same_curve(ranks, expected):
    assert close(ranks[0], expected)


def law_of(recipe, *names):
    layouts = {name: attrs.evolve(LAYOUTS[name], micro_batch_size=4) for name in names}
    return Case(recipe, observe=observation(recipe), compare=same_curve, layouts=layouts)


test_layouts = layout_law(
    law_of("tensorwise", "replicate2", "fsdp2", "tp2"),
    law_of("rowwise", "fsdp2", "tp2"),
    law_of("rowwise_with_gw_hp", "tp2"),
)


def test_in_a_pipeline(tmp_path):
    # It computes gradients of weights by themselves, as a plain schedule has them in one pass with the others.
    schedule = "interleaved_zero_bubble" if splits_backward(torch.__version__) else "1f1b"
    stages = {"pp": PipelineParallel(degree=2, schedule=schedule), "float8": Float8(recipe="rowwise")}
    model = transformer(layers=4)
    train(tmp_path / "one", {"float8": Float8(recipe="rowwise")}, model=model)
    run_on_ranks(2, lambda rank: train(tmp_path / "two", stages, model=model))
    assert close(curve(tmp_path / "two"), curve(tmp_path / "one"))


def test_sharded_and_split_at_once(tmp_path, alone):
    run_on_ranks(4, lambda rank: train(tmp_path, {"float8": Float8(), **FSDP2, **TP2}))
    assert close(curve(tmp_path), alone("tensorwise"))


def test_high_precision_gradients_make_the_curve_independent_of_which_tokens_go_together(tmp_path, alone):
    stages = {"float8": Float8(recipe="rowwise_with_gw_hp"), "cp": ContextParallel(degree=2)}
    run_on_ranks(2, lambda rank: train(tmp_path, stages, micro_batch_size=2))
    assert close(curve(tmp_path), alone("rowwise_with_gw_hp"))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_rounds_the_same(tmp_path, alone, mode):
    train(tmp_path, {"float8": Float8(), "activation_checkpointing": ActivationCheckpointing(mode=mode)})
    assert curve(tmp_path) == alone("tensorwise")


@pytest.mark.slow
def test_it_is_compiled_into_one_graph(tmp_path):
    torch._dynamo.reset()
    stages = {"float8": Float8(recipe="rowwise")}
    for name, added in (("eager", {}), ("compiled", {"compile": Compile(backend="aot_eager")})):
        train(tmp_path / name, {**stages, **added}, model=transformer(layers=1), steps=1, eval={"interval": 0})
    assert close(curve(tmp_path / "compiled"), curve(tmp_path / "eager"))


# --- state -------------------------------------------------------------------------------------------------------


def test_parameters_and_initial_values_are_those_of_the_bare_model(tmp_path):
    bare = {item.name: item for item in built(tmp_path, {}).parameters}
    found = {item.name: item for item in built(tmp_path, {"float8": Float8()}).parameters}
    assert found.keys() == bare.keys()
    assert all(torch.equal(found[name].parameter, bare[name].parameter) for name in bare)
    assert all((found[name].role, found[name].parameter.dtype) == (bare[name].role, torch.float32) for name in bare)


def test_a_checkpoint_serves_any_layout_with_or_without_float8(tmp_path, alone):
    stages = {"float8": Float8(recipe="rowwise")}
    run_on_ranks(2, lambda rank: train(tmp_path, {**stages, **FSDP2}, steps=1))
    run_on_ranks(2, lambda rank: train(tmp_path, {**stages, **TP2}, steps=2))
    train(tmp_path, {}, steps=3)
    assert close(curve(tmp_path), alone("rowwise"))


# --- which layers ------------------------------------------------------------------------------------------------


def test_the_plan_says_what_is_computed_how(tmp_path):
    run = built(tmp_path, {"float8": Float8(recipe="rowwise", exclude=("layers.0.ffn.*",))})
    [line] = [line for line in describe_run(run, Stepper(run), {"distributions": {}}).splitlines() if "float8" in line]
    assert not lacks(line, "rowwise", "float32", "CPU", "11 linear layers")
    assert " layers.0-1.attention.q, layers.0-1.attention.k, " in line
    assert line.endswith("not layers.0.ffn.gate, layers.0.ffn.up, layers.0.ffn.down (excluded); not head (exempt)")


def test_the_plan_warns_of_products_that_are_not_compiled(tmp_path):
    with mock.patch("forge_plugin_lowbit.float8.stage.multiplies_float8", return_value=True):
        eager = built(tmp_path, {"float8": Float8()}).built_stages[0].describe()
        compiled = built(tmp_path, {"float8": Float8(), "compile": Compile()}).built_stages[0].describe()
    assert not lacks(eager, "tensorwise", "[parallel.compile]", "14 linear layers")
    assert not lacks(compiled, "tensorwise", "14 linear layers")
    assert "[parallel.compile]" not in compiled


def test_sizes_that_no_float8_product_takes_are_left_out(tmp_path):
    run = built(tmp_path, {"float8": Float8()}, model=transformer(ffn=SwiGLU(hidden=40)))
    assert "8 linear layers" in run.built_stages[0].describe()
    names = "layers.0-1.ffn.gate, layers.0-1.ffn.up, layers.0-1.ffn.down"
    assert not lacks(run.built_stages[0].describe(), f"not {names}", 16)


def test_numbers_are_put_together():
    names = ["a.0.b.1", "a.1.b.1", "head", "a.2.c", "a.10.b.1", "a.11.b.1", "a.3.c", "x2.y"]
    assert short(names) == "a.0-1,10-11.b.1, head, a.2-3.c, x2.y"


class Odd(Linear):
    """A linear layer that does something else."""

    def forward(self, x):
        return 2 * super().forward(x)


@frozen(kw_only=True)
class RoutedModel(TinyModel):
    """Declares an exemption, and has torch's own linear layers besides."""

    def build(self, context):
        model = TinyNetwork(self.dim, self.layers, 0.0, 32, context.dtype)
        for layer in model.layers.values():
            layer.up = nn.Linear(self.dim, 2 * self.dim)
            layer.router = Linear(self.dim, self.dim)
            layer.odd = Odd(self.dim, self.dim)
        model.float8_exempt = lambda: ["layers.*.router"]
        return model


def test_models_declare_what_is_exempt_and_the_head_always_is(tmp_path):
    train(tmp_path, {"float8": Float8()}, steps=1, model=RoutedModel(layers=1))
    described = built(tmp_path, {"float8": Float8()}, model=RoutedModel(layers=1)).built_stages[0].describe()
    assert not lacks(described, "2 linear layers", "layers.0.up, layers.0.down")
    assert "not layers.0.router, head (exempt)" in described
    assert "not layers.0.odd (" in described


def test_it_stands_after_the_pipeline_split_and_before_all_else():
    class Stage(ParallelComponent):
        owns_reduction: ClassVar[bool] = False

    names = ["fsdp", "compile", "activation_checkpointing", "cp", "ep", "tp", "pp"]
    kinds = {name: type(name, (Stage,), {}) for name in names}
    stages = {name: kind() for name, kind in kinds.items()} | {"float8": Float8()}
    order = [stage.name for stage in order_stages(stages, with_components(Catalog.installed(), {"parallel": kinds}))]
    assert order[:2] == ["pp", "float8"]


def test_installed_stages_agree_on_the_order():
    stages = {**FSDP2, **TP2, "compile": Compile(), "activation_checkpointing": ActivationCheckpointing()}
    order = [stage.name for stage in order_stages({**stages, "float8": Float8()}, Catalog.installed())]
    assert order == ["float8", "tp", "activation_checkpointing", "compile", "fsdp"]


def test_reading_a_job_imports_neither_torch_nor_torchao():
    code = "import forge_plugin_lowbit.float8, sys; sys.exit(any(name in sys.modules for name in ('torch', 'torchao')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- float8 gathering --------------------------------------------------------------------------------------------

AS_BYTES = torch.uint8
BEFORE = WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather
AFTER = WeightWithDynamicFloat8CastTensor.fsdp_post_all_gather


def _send_bytes(self, mesh):
    (data,), scales = BEFORE(self, mesh)
    return (data.view(AS_BYTES),), scales


def _receive_bytes(self, outputs, metadata, param_dtype, *, out=None):
    if out is not None:
        return AFTER(self, outputs, metadata, param_dtype, out=out)
    found, _ = AFTER(self, (outputs[0].view(torch.float8_e4m3fn),), metadata, param_dtype)
    return found, outputs


def test_gathering_in_float8(tmp_path, alone):
    """As on GPUs, but for what travels: gloo cannot send float8, so that bytes are sent here."""

    def run(rank):
        patch = mock.patch.multiple(
            WeightWithDynamicFloat8CastTensor, fsdp_pre_all_gather=_send_bytes, fsdp_post_all_gather=_receive_bytes
        )
        with patch, mock.patch("forge_plugin_lowbit.float8.stage.sends_float8", return_value=True):
            for steps in (2, 3):  # the second run continues the first
                train(tmp_path, {"float8": Float8(all_gather=True), **FSDP2}, steps=steps)

    run_on_ranks(2, run)
    assert close(curve(tmp_path), alone("tensorwise"))
    train(tmp_path, {}, steps=4)  # the checkpoint is one of plain weights
    assert len(curve(tmp_path)) == 4 * 3


# --- what is refused ---------------------------------------------------------------------------------------------


def problems(stage, layout=None, **changes):
    parallel = {"float8": stage, **changes.pop("parallel", {})}
    return list(stage.problems(job("x", parallel, **changes), layout or Layout()))


class TestWhatIsRefused:
    def test_float64(self):
        check_problems(problems(Float8(), precision="fp64"), at("", 'train.precision = "fp64"', '"bf16"', '"fp32"'))

    def test_tokens_that_no_product_sums_over(self):
        check_problems(problems(Float8(), seq_len=6), at("recipe", "24 tokens"))
        assert not problems(Float8(recipe="rowwise_with_gw_hp"), seq_len=6)
        assert not problems(Float8(), seq_len=8)
        assert problems(Float8(), Layout(cp=4), seq_len=8)

    def test_gathering_in_float8_where_it_cannot_be(self):
        stage = Float8(recipe="rowwise", all_gather=True)
        check_problems(
            problems(stage, Layout(tp=2), device="cpu"),
            at("all_gather", "rowwise", 'recipe = "tensorwise"'),
            at("all_gather", "[parallel.fsdp]"),
            at("all_gather", "tensor parallel"),
            at("all_gather", "GPUs", "gloo"),
        )
        assert not problems(Float8(all_gather=True), parallel=FSDP2)

    def test_gathering_in_float8_on_a_device_that_was_found_to_be_a_cpu(self, tmp_path):
        with refuses("parallel.float8.all_gather", "GPUs", "gloo"):
            built(tmp_path, {"float8": Float8(all_gather=True), **FSDP2})

    def test_a_model_without_linear_layers(self, tmp_path):
        with refuses("parallel.float8", "TinyNetwork", "layers.0-1.up, layers.0-1.down", 16, "head"):
            built(tmp_path, {"float8": Float8()}, model=TinyModel(dim=12))

    def test_a_pattern_that_fits_nothing(self, tmp_path):
        with refuses("parallel.float8.exclude", "'layers.0.attention.w'", "'layers.0.attention.v'"):
            built(tmp_path, {"float8": Float8(exclude=("layers.0.attention.w",))})

    def test_a_part_that_no_float8_product_takes(self, tmp_path):
        model = transformer(attention=GroupedQueryAttention(heads=4, kv_heads=2))

        wanted = job("x", {"float8": Float8(), **TP2}, model=model)
        names = ("layers.0-1.attention.k, layers.0-1.attention.v", "16 rows", 8, "2 tensor-parallel ranks")
        check_problems(problems_of(wanted, 2), at("parallel.float8", *names))


@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_devices_with_float8_products(capability, has):
    assert not multiplies_float8(torch.device("cpu"))
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        assert multiplies_float8(torch.device("cuda")) == has
