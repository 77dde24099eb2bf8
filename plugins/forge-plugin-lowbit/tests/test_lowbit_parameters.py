"""Parameters in bfloat16, which updates round stochastically."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from torch.distributed.tensor import DTensor
from torchao.optim import _AdamW as TorchaoAdamW

from forge_core.parallel.mesh import leave_group
from forge_core.plugins.catalog import Catalog
from forge_kit.optim.whole_matrices import own_box
from forge_kit.tools.checkpoints import stored_tensors
from forge_plugin_ema import EMA
from forge_plugin_lowbit import AdamW4bit, AdamW8bit, AdamWBF16, AdamWFloat8
from forge_plugin_parallel import FSDP, PipelineParallel
from forge_plugin_parallel.pp import splits_backward
from forge_plugin_plan.estimate import make_plan
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import TinyModel, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import train as train_curve
from forge_testing.laws import Case, Interrupted, layout_law, resumption_law
from forge_testing.layouts import LAYOUTS, LayoutCase
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.runs import draw, tiny_run, whole_tensors
from forge_testing.suites import OptimizerSuite

NARROW = {"parameter_dtype": "bf16", "compile": False}
OPTIMIZERS = [AdamWBF16(**NARROW), AdamW8bit(**NARROW), AdamW4bit(**NARROW), AdamWFloat8(**NARROW)]
MODEL = Transformer(
    dim=16, layers=2, vocab_size=32, attention=GroupedQueryAttention(heads=4, kv_heads=2), tie_embeddings=True
)
SIZES = {"seq_len": 16, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp32"}


class TestAdamWBF16WithNarrowParameters(OptimizerSuite):
    component = AdamWBF16(lr=1e-2, eps=1e-5, **NARROW)
    layouts = ()  # they are compared in float64; see below


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_parameters_are_kept_in_16_bits(tmp_path, optimizer):
    run = tiny_run(tmp_path, model=MODEL, optimizer=optimizer, precision="bf16")
    assert {item.parameter.dtype for item in run.parameters} == {torch.bfloat16}
    wide = tiny_run(tmp_path, model=MODEL, optimizer=AdamWBF16(compile=False), precision="bf16")
    for narrow, item in zip(run.parameters, wide.parameters, strict=True):
        assert torch.equal(narrow.parameter, item.parameter.bfloat16()), "the same initial values, but for rounding"


def test_an_update_is_torchaos_rounded_to_a_neighbour_and_exact_in_the_mean(tmp_path):
    """An update of a hundredth of what bfloat16 can tell apart. To the nearest, nothing would ever move."""
    run = tiny_run(tmp_path, model=TinyModel(dim=256), optimizer=AdamWBF16(lr=1e-2, weight_decay=0.1, **NARROW))
    weight = next(item.parameter for item in run.parameters if item.role == "matrix")
    lr = 1e-4
    run.optimizer.param_groups[0]["lr"] = lr
    with torch.no_grad():
        weight.fill_(3.0)
    twin = torch.nn.Parameter(weight.detach().float())
    reference = TorchaoAdamW([twin], lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    weight.grad, twin.grad = torch.full_like(twin, 0.5), torch.full_like(twin, 0.5)
    run.optimizer.step()
    with torch.compiler.set_stance("force_eager"):
        reference.step()
    exact, step = twin[0, 0].double().item(), 2.0**-6
    assert 0 < 3 - exact < step / 50
    assert weight.unique().tolist() == [3 - step, 3.0]
    share = (3 - exact) / step
    spread = step * math.sqrt(share * (1 - share) / weight.numel())
    assert abs(weight.double().mean().item() - exact) < 5 * spread


def test_parameters_and_moments_have_random_bits_of_their_own(tmp_path):
    """Else the rounding of a weight would go with that of its average."""
    run = tiny_run(tmp_path, optimizer=AdamWBF16(**NARROW))
    item = run.parameters[0]
    keys = [
        run.optimizer._rounding.of(item.parameter, torch.tensor(float(step)), purpose)[0].tolist()
        for step in (1, 2)
        for purpose in ("rounding", "parameters")
    ]
    assert len({tuple(key) for key in keys}) == 4


@pytest.mark.slow
def test_a_compiled_step_is_an_eager_one(tmp_path):
    """To a neighbour: where a kernel's arithmetic differs in the last bit of float32, rounding may."""
    weights = []
    for compiled in (True, False):
        optimizer = AdamW8bit(lr=0.01, parameter_dtype="bf16", compile=compiled)
        run = tiny_run(tmp_path, model=TinyModel(dim=64, layers=1), optimizer=optimizer)
        for step in range(3):
            for item in run.parameters:
                item.parameter.grad = draw(item.name, item.parameter.shape, step).float()
            run.optimizer.step()
        weights.append([item.parameter.detach() for item in run.parameters])
    torch.testing.assert_close(*weights, rtol=2**-7, atol=1e-5)
    same = [(a == b).double().mean().item() for a, b in zip(*weights, strict=True)]
    assert min(same) > 0.99


# --- gradients ---------------------------------------------------------------------------------------------------


def gradients_of(folder, changes):
    """Whole gradients of a step over 64 sequences, in one line, and their dtypes."""
    sizes = SIZES | {"global_batch_size": 64, "micro_batch_size": 64, "steps": 1} | changes
    model = attrs.evolve(MODEL, layers=1)
    job = tiny_job(str(folder), installed(), optimizer=AdamWBF16(**NARROW), model=model, **sizes)
    gradients = train_curve(job).gradients
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)]), {
        gradient.dtype for gradient in gradients.values()
    }


def near(dtype):
    def compare(ranks, alone):
        expected, _ = alone
        for gradients, dtypes in ranks:
            assert dtypes == {dtype}
            assert ((gradients - expected).norm() / expected.norm()).item() < 7e-3

    return compare


# Those of single micro-batches have 8 bits, and so has what fsdp keeps of their sum. Of 64 of them that makes half a
# percent; adding up in bfloat16 would make one.
test_gradients_add_up_in_float32 = layout_law(
    Case(
        "gradients",
        observe=gradients_of,
        compare=near(torch.float32),
        layouts={
            name: attrs.evolve(layout, micro_batch_size=1)
            for name, layout in {
                "one process": LayoutCase(ranks=1, parallel={}),
                "replicate2": LAYOUTS["replicate2"],
            }.items()
        },
    ),
    Case(
        "sharded gradients",
        observe=gradients_of,
        compare=near(torch.bfloat16),
        layouts={"fsdp2": attrs.evolve(LAYOUTS["fsdp2"], micro_batch_size=1)},
    ),
)


def test_gradients_that_would_add_up_in_16_bits_are_refused(tmp_path):
    settings = {"optimizer": AdamW8bit(**NARROW), "model": MODEL, **SIZES, "micro_batch_size": 1}
    zero_bubble = PipelineParallel(degree=2, schedule="interleaved_zero_bubble", stages_per_rank=1)
    job = tiny_job(str(tmp_path), parallel={"pp": zero_bubble}, **settings)
    older = [] if splits_backward(torch.__version__) else [at("parallel.pp.schedule", "torch 2.13")]
    check_problems(problems_of(job, 2), *older, at("parallel.pp.schedule", "interleaved_zero_bubble", "bf16"))
    job = tiny_job(str(tmp_path), parallel={"fsdp": FSDP(reduce_every_micro_batch=True)}, **settings)
    check_problems(problems_of(job, 2), at("parallel.fsdp.reduce_every_micro_batch", "bf16"))


# --- layouts -----------------------------------------------------------------------------------------------------


def rounded(optimizer):
    """Whole weights after updates by gradients that are the same under every layout."""

    def stepped(folder, changes):
        run = tiny_run(folder, optimizer=optimizer, model=MODEL, **SIZES | changes)
        for step in range(3):
            for item in run.parameters:
                gradient = draw(item.name, item.parameter.shape, step).bfloat16()
                if isinstance(item.parameter, DTensor):
                    mesh, placements = item.parameter.device_mesh, item.parameter.placements
                    part = gradient[own_box(item.parameter, run.context.mesh)].contiguous()
                    gradient = DTensor.from_local(
                        part, mesh, placements, shape=gradient.shape, stride=gradient.stride(), run_check=False
                    )
                item.parameter.grad = gradient.to(item.parameter.grad_dtype)
            run.optimizer.step()
        return whole_tensors({item.name: item.parameter for item in run.parameters}, run.context.mesh)

    return stepped


def equal_weights(ranks, alone):
    """To the bit."""
    for weights in ranks:
        assert weights.keys() == alone.keys()
        assert [key for key, weight in alone.items() if not torch.equal(weights[key], weight)] == []


test_rounding_under_layouts = layout_law(
    Case(
        "bf16",
        observe=rounded(AdamWBF16(**NARROW)),
        compare=equal_weights,
        layouts=("pp2", "cp2", "hsdp2x2", "fsdp2_tp2"),
    ),
    Case(
        "8bit",
        observe=rounded(AdamW8bit(min_size=1, block_size=8, **NARROW)),
        compare=equal_weights,
        layouts=("replicate2", "fsdp2", "tp2"),
    ),
)


def losses(folder, changes):
    settings = {"optimizer": AdamWBF16(lr=0.01, **NARROW), "model": MODEL, "steps": 5, **SIZES, **changes}
    return train_curve(tiny_job(str(folder), installed(), **settings)).losses


def near_losses(ranks, alone):
    """As far as rounding lets it: gradients differ in their last bits, and fsdp rounds them."""
    assert alone[-1] < 0.95 * alone[0]
    for curve in ranks:
        assert curve == pytest.approx(alone, rel=5e-3)


test_curves_under_layouts = layout_law(
    Case("losses", observe=losses, compare=near_losses, layouts=("fsdp2", "tp2", "pp2")),
)


# --- runs --------------------------------------------------------------------------------------------------------


def test_it_trains_as_well_as_32_bits(make_job, train, lines):
    settings = {"model": TinyModel(dim=64), "steps": 30, "global_batch_size": 16}
    full = lines(train(make_job(optimizer=AdamWBF16(lr=3e-3, compile=False), job={"name": "full"}, **settings)))
    narrow = lines(train(make_job(optimizer=AdamWBF16(lr=3e-3, **NARROW), job={"name": "narrow"}, **settings)))
    assert full[-1]["loss"] < 0.7 * full[0]["loss"]
    assert narrow[-1]["loss"] == pytest.approx(full[-1]["loss"], rel=0.03)


def narrow(optimizer):
    return lambda: {"optimizer": optimizer, "model": TinyModel(dim=64), "precision": "bf16"}


test_resumption = resumption_law(
    *(Interrupted(type(optimizer).__name__, changes=narrow(optimizer)) for optimizer in OPTIMIZERS)
)


def test_a_checkpoint_of_float32_may_be_continued(make_job, train):
    """And the other way round."""
    settings = {"model": TinyModel(dim=64), "checkpoint": {"interval": 3}}
    one = train(make_job(steps=3, optimizer=AdamWBF16(compile=False), **settings))
    start = dict(read(one.folder / "checkpoints/step-3"))
    train(make_job(steps=4, optimizer=AdamWBF16(lr=1e-30, **NARROW), **settings), resume_with_changes=True)
    narrow = dict(read(one.folder / "checkpoints/step-4"))
    assert all(torch.equal(narrow[name], weight.bfloat16()) for name, weight in start.items())
    train(make_job(steps=5, optimizer=AdamWBF16(lr=1e-30, compile=False), **settings), resume_with_changes=True)
    wide = dict(read(one.folder / "checkpoints/step-5"))
    assert all(torch.equal(wide[name], weight.float()) for name, weight in narrow.items())


def read(checkpoint):
    from forge_kit.tools.whole_tensors import read_whole

    stored = {name: entry for name, entry in stored_tensors(checkpoint).items() if name.startswith("model.")}
    return read_whole(checkpoint, stored, stored)


def test_a_plan_counts_two_bytes_a_parameter(tmp_path):
    plans = {}
    for dtype in ("fp32", "bf16"):
        optimizer = AdamWBF16(parameter_dtype=dtype)
        job = tiny_job(str(tmp_path), Catalog.installed(), model=MODEL, optimizer=optimizer, **SIZES)
        leave_group()
        plans[dtype] = make_plan(job, Catalog.installed(), 1).ranks[0]
    assert plans["bf16"].weights * 2 == plans["fp32"].weights
    assert plans["bf16"].gradients == plans["fp32"].gradients


def test_what_cannot_be_done_with_them_is_refused(tmp_path):
    job = tiny_job(str(tmp_path), optimizer=AdamWBF16(**NARROW), precision="fp64")
    check_problems(problems_of(job), at("optimizer.parameter_dtype", "train.precision"))
    job = tiny_job(str(tmp_path), optimizer=AdamWBF16(**NARROW), plugins={"ema": EMA()})
    check_problems(problems_of(job), at("plugins.ema", "bf16"))
