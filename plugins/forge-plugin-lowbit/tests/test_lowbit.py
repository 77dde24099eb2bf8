"""The low-bit optimizers against torchao's, and against themselves under every layout."""

from __future__ import annotations

import copy
import inspect
import math

import attrs
import pytest
import torch
from attrs import define
from torch import nn
from torch._dynamo.utils import counters
from torchao.optim import AdamW4bit as TorchaoAdamW4bit
from torchao.optim import AdamW8bit as TorchaoAdamW8bit
from torchao.optim import AdamWFp8 as TorchaoAdamWFp8
from torchao.optim import _AdamW as TorchaoAdamW

from forge_core.checkpoint.state import Progress, gather_state
from forge_core.config.rules import check_rules
from forge_core.contracts.components import ParameterGroup
from forge_core.contracts.errors import CheckpointError
from forge_core.engine.trainer import Trainer
from forge_core.parallel.mesh import leave_group
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.checkpoints import stored_tensors
from forge_kit.tools.whole_tensors import read_whole
from forge_plugin_lowbit import AdamW4bit, AdamW8bit, AdamWBF16, AdamWFloat8
from forge_plugin_lowbit.bf16 import BF16AdamW
from forge_plugin_lowbit.formats import EIGHT_BIT
from forge_plugin_lowbit.moments import QuantisedAdamW
from forge_plugin_lowbit.optimizer import LowBitAdamW
from forge_plugin_lowbit.rounding import place_of, random_bits, round_with
from forge_plugin_parallel import FSDP, TensorParallel
from forge_plugin_plan.estimate import make_plan
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import TinyAdamW, TinyModel, tiny_job
from forge_testing.catalogs import installed
from forge_testing.laws import Case, Interrupted, layout_law, resumption_law
from forge_testing.layouts import LAYOUTS
from forge_testing.outcomes import Stop
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, naming, refuses
from forge_testing.runs import advance, draw, tiny_run, whole_tensors

QUANTISED = {AdamW8bit: TorchaoAdamW8bit, AdamW4bit: TorchaoAdamW4bit, AdamWFloat8: TorchaoAdamWFp8}
EAGER = {"compile": False}


def set_gradients(run, twin, step):
    for item in run.parameters:
        item.parameter.grad = draw(item.name, item.parameter.shape, step).float()
        twin[item.name].grad = item.parameter.grad.clone()


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("component", QUANTISED)
def test_every_step_is_torchaos(tmp_path, component):
    """To the bit; the matrices (128, 64) of the model have blocks of several rows."""
    run = tiny_run(tmp_path, model=TinyModel(dim=64), optimizer=component(lr=0.01, **EAGER))
    twin = dict(copy.deepcopy(run.model).named_parameters())
    decayed, spared = ([twin[name] for name in group["names"]] for group in run.optimizer.param_groups)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    reference = QUANTISED[component](groups, lr=0.01, betas=(0.9, 0.95), block_size=component().block_size)
    with torch.compiler.set_stance("force_eager"):
        for step in range(4):
            set_gradients(run, twin, step)
            run.optimizer.step()
            reference.step()
    for item in run.parameters:
        torch.testing.assert_close(item.parameter, twin[item.name], rtol=0, atol=0)
    quantised = [item for item in run.parameters if "exp_avg_scale" in run.optimizer.state[item.parameter]]
    assert len(quantised) == 4


@pytest.mark.slow
@pytest.mark.parametrize("component", [AdamW8bit, AdamWBF16])
def test_a_compiled_step_is_an_eager_one(tmp_path, component):
    """But for the order in which a kernel does its arithmetic."""
    weights = []
    for compiled in (True, False):
        run = tiny_run(tmp_path, model=TinyModel(dim=64, layers=1), optimizer=component(lr=0.01, compile=compiled))
        for step in range(3):
            for item in run.parameters:
                item.parameter.grad = draw(item.name, item.parameter.shape, step).float()
            run.optimizer.step()
        weights.append([item.parameter.detach() for item in run.parameters])
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_one_compiled_kernel_does_for_parameters_of_all_sizes(tmp_path):
    run = tiny_run(tmp_path, model=TinyModel(dim=64), optimizer=AdamW8bit(min_size=1))
    for item in run.parameters:
        item.parameter.grad = torch.ones_like(item.parameter)
    torch._dynamo.reset()
    counters.clear()
    run.optimizer.step()
    assert len({item.parameter.numel() for item in run.parameters}) == 4
    assert counters["stats"]["unique_graphs"] == 2, "one for codes, one for float32 moments"


@pytest.mark.slow
def test_a_compiled_kernel_has_the_random_bits_of_an_eager_one():
    @torch.compile(fullgraph=True)
    def compiled(elements, place, key):
        return random_bits(place, key, elements.shape[0])

    for shape, offsets, sizes in (((12, 10), (3, 4), (5, 3)), ((14, 20), (0, 5), (14, 10))):
        place, elements = place_of(offsets, sizes, shape), torch.empty(math.prod(sizes))
        torch._dynamo.mark_dynamic(elements, 0)
        found = compiled(elements, torch.tensor(place), torch.tensor([3, 4]))
        assert torch.equal(found, bits_of(place, [3, 4]))


@define(kw_only=True, slots=False)
class StopAndForgetKernels(Stop):
    """The run that continues compiles again, as a process of its own does."""

    def on_train_end(self, context):
        torch.compiler.reset()


def compiled(component):
    return lambda: {"optimizer": component(), "model": TinyModel(dim=64, layers=1), "steps": 4}


test_resumption_with_compiled_steps = pytest.mark.slow(
    resumption_law(
        *(
            Interrupted(component.__name__, changes=compiled(component), interruptions=[[StopAndForgetKernels(step=2)]])
            for component in (AdamW8bit, AdamWBF16)
        )
    )
)


@pytest.mark.parametrize(
    ("component", "most"), [(AdamW8bit, 2.04), (AdamWFloat8, 2.04), (AdamW4bit, 1.07), (AdamWBF16, 4.01)]
)
def test_moments_take_as_many_bytes_as_promised(tmp_path, component, most):
    run = tiny_run(tmp_path, model=TinyModel(dim=64), optimizer=component(**EAGER))
    item = next(item for item in run.parameters if item.role == "matrix")
    item.parameter.grad = torch.ones_like(item.parameter)
    run.optimizer.step()
    state = run.optimizer.state[item.parameter]
    assert sum(value.nbytes for value in state.values() if value.ndim) / item.parameter.numel() < most


def test_small_and_excluded_parameters_keep_float32_moments(tmp_path):
    optimizer = AdamW8bit(exclude=("layers.0.*",), min_size=64 * 128, **EAGER)
    run = tiny_run(tmp_path, model=TinyModel(dim=64), optimizer=optimizer)
    for item in run.parameters:
        item.parameter.grad = torch.ones_like(item.parameter)
    run.optimizer.step()
    dtypes = {item.name: run.optimizer.state[item.parameter]["exp_avg"].dtype for item in run.parameters}
    assert {name for name, dtype in dtypes.items() if dtype == torch.uint8} == {
        name for name in dtypes if name.startswith("layers.1.") and name.endswith(".weight")
    }


# --- layouts -----------------------------------------------------------------------------------------------------


MODEL = Transformer(
    dim=16, layers=2, vocab_size=32, attention=GroupedQueryAttention(heads=4, kv_heads=2), tie_embeddings=True
)
OPTIMIZERS = {
    "adamw_8bit": AdamW8bit(lr=0.05, block_size=8, min_size=1, **EAGER),
    "adamw_8bit, blocks of two rows": AdamW8bit(lr=0.05, block_size=32, min_size=1, **EAGER),
    "adamw_4bit": AdamW4bit(lr=0.05, block_size=8, min_size=1, **EAGER),
    "adamw_float8": AdamWFloat8(lr=0.05, block_size=8, min_size=1, **EAGER),
    "adamw_bf16": AdamWBF16(lr=0.05, **EAGER),
}
SIZES = {"seq_len": 16, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp64"}


def observation(optimizer):
    """Weights and moments after two steps: the second reads the moments that the first wrote."""

    def trained(folder, changes):
        run = tiny_run(folder, optimizer=optimizer, model=MODEL, **SIZES | changes)
        advance(run, 2)
        tensors = gather_state(run.model, run.optimizer, Progress(), {}).tensors
        return whole_tensors(tensors, run.context.mesh)

    return trained


def same_state(ranks, alone):
    """Codes, scales and rounded moments too."""
    for tensors in ranks:
        assert tensors.keys() == alone.keys()
        assert any(key.endswith("_scale") or tensor.dtype == torch.bfloat16 for key, tensor in tensors.items())
        for key, tensor in alone.items():
            torch.testing.assert_close(tensors[key], tensor, rtol=1e-6, atol=1e-9, msg=key)


# The quantised formats share the code that cuts blocks. An optimizer sees only how its parameters are cut: context and
# pipeline parallelism beside fsdp would show nothing more. For bf16 on four ranks see test_lowbit_parameters.py.
UNDER = {
    "adamw_8bit": ("replicate2", "pp2", "fsdp2_tp2"),
    "adamw_8bit, blocks of two rows": ("fsdp4", "hsdp2x2"),  # tp would cut them
    "adamw_4bit": ("fsdp2_tp2",),
    "adamw_float8": ("fsdp2_tp2",),
    "adamw_bf16": ("tp2", "pp2"),
}
test_layouts = layout_law(
    *(
        Case(name, observe=observation(OPTIMIZERS[name]), compare=same_state, layouts=layouts)
        for name, layouts in UNDER.items()
    )
)


TP = {"tp": TensorParallel(degree=2)}
CHAIN = ["one process", "fsdp2_tp2", "pp2", "one process"]
CONTINUED = ("adamw_8bit", "adamw_4bit")
"""The state of `adamw_float8` is of the same kind, that of `adamw_bf16` of plain tensors."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folder of the last checkpoint of every optimizer, of a run with a step under each layout of the chain, and of one
    in one process."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def train(which, layout, steps):
        parallel = LAYOUTS[layout].changes(installed()) if layout in LAYOUTS else {}
        changes = {"steps": steps, "gc_interval": 0, **SIZES, **parallel}
        jobs = [
            tiny_job(str(folder / which / name), model=MODEL, optimizer=optimizer, **changes)
            for name, optimizer in OPTIMIZERS.items()
            if name in CONTINUED
        ]

        def steps_of(rank):
            return [Trainer(job, catalog=installed(), echo=len).run().step for job in jobs]

        run_on_ranks(LAYOUTS[layout].ranks, steps_of) if layout in LAYOUTS else steps_of(0)

    for number, layout in enumerate(CHAIN, 1):
        train("chain", layout, number)
    train("one", "one process", len(CHAIN))
    return lambda which, name: folder / which / name / f"run/checkpoints/step-{len(CHAIN)}"


@pytest.mark.parametrize("name", CONTINUED)
def test_a_run_continues_under_every_layout(checkpoints, name):
    chain, one = checkpoints("chain", name), checkpoints("one", name)
    stored = stored_tensors(one)
    assert stored == stored_tensors(chain)
    seen, expected = read_whole(chain, stored, stored), read_whole(one, stored, stored)
    for key, tensor in expected.items():
        torch.testing.assert_close(seen[key].double(), tensor.double(), rtol=1e-6, atol=1e-9, msg=key)


@pytest.mark.parametrize(
    ("block_size", "names"),
    [
        (32, ["[16, 8]", "layers.0.attention.o.weight", "[16, 16]"]),
        (256, ["[8, 16]", "layers.0.attention.q.weight"]),
    ],
)
def test_a_stage_that_cuts_blocks_is_refused_with_a_size_that_it_does_not_cut(tmp_path, block_size, names):
    def refused(rank):
        with refuses("optimizer.block_size", *names, f"{block_size} elements", 8, "optimizer.exclude"):
            tiny_run(
                tmp_path,
                parallel=TP,
                optimizer=AdamW8bit(block_size=block_size, min_size=1, **EAGER),
                model=MODEL,
                **SIZES,
            )

    run_on_ranks(2, refused)


def problems_on(ranks, folder, optimizer, **stages):
    catalog = Catalog.installed()
    settings = {**SIZES, "global_batch_size": 6, "optimizer": optimizer, "parallel": stages}
    job = tiny_job(str(folder), catalog, model=MODEL, **settings)
    return list(check_rules(job, catalog, ranks))


def test_blocks_that_fsdp_cuts_are_refused_when_the_job_is_checked(tmp_path):
    optimizer = AdamW8bit(block_size=256, min_size=1)
    names = ("[11, 16]", "embedding.weight", "[32, 16]", "256 elements", 16, "optimizer.exclude")
    check_problems(problems_on(3, tmp_path, optimizer, fsdp=FSDP()), at("optimizer.block_size", *names))
    assert problems_on(3, tmp_path, AdamW8bit(block_size=16, min_size=1), fsdp=FSDP()) == []
    assert problems_on(3, tmp_path, optimizer) == []


def test_parameters_whose_blocks_are_cut_may_be_excluded(tmp_path):
    optimizer = AdamW8bit(block_size=32, min_size=1, exclude=("*.o.weight",), **EAGER)
    (state, _) = run_on_ranks(2, lambda rank: observation(optimizer)(tmp_path, {"parallel": TP}))
    assert "optimizer.layers.0.attention.o.weight.exp_avg_scale" not in state
    assert "optimizer.layers.0.attention.q.weight.exp_avg_scale" in state


# --- stochastic rounding -----------------------------------------------------------------------------------------


def bits_of(place, key):
    return random_bits(torch.tensor(place), torch.tensor(key), math.prod(count for _, count, _ in place))


def test_rounding_gives_a_neighbour_and_the_mean_is_exact():
    x = torch.tensor([1.0, 1.001, -3.1415927, 1e-30, 0.0, 65504.0])
    bits = bits_of([(0, 20000 * len(x), 1)], [1, 2]).view(20000, -1) & 0xFFFF
    rounded = round_with(x.expand(20000, -1).contiguous(), bits)
    low = (x.view(torch.int32) & -0x10000).view(torch.float32)
    high = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    high = torch.where(x == low, low, high)
    assert bool(((rounded == low) | (rounded == high)).all())
    spread = (high - low).abs() / 2 / 20000**0.5
    assert bool(((rounded.double().mean(0) - x).abs() <= 5 * spread).all())


def test_both_moments_are_rounded_by_bits_of_their_own():
    parameter = torch.nn.Parameter(torch.zeros(2**14))
    gradient = parameter.grad = draw("weight", parameter.shape).float()
    optimizer = BF16AdamW([parameter], betas=(0.9, 0.95))
    optimizer.step()
    errors = []
    for slot, exact in {"exp_avg": gradient * 0.1, "exp_avg_sq": gradient.square() * 0.05}.items():
        error = optimizer.state[parameter][slot].double() - exact.double()
        errors.append(error / exact.abs().log2().floor().exp2())  # in steps of bfloat16
    correlation = torch.corrcoef(torch.stack([errors[0] * gradient.sign(), errors[1]]))[0, 1]
    assert abs(correlation) < 0.05


def test_rounding_leaves_what_is_not_finite():
    x = torch.tensor([float("inf"), -float("inf"), float("nan")])
    rounded = round_with(x, torch.full((3,), 0xFFFF))
    assert rounded[:2].tolist() == [float("inf"), -float("inf")]
    assert bool(rounded[2].isnan())


def test_random_bits_differ_by_key_and_place_and_are_even():
    count = 2**18
    one, other = (bits_of([(0, count, 1)], key) for key in ([7, 7], [7, 8]))
    far = bits_of([(2**34, count, 1)], [7, 7])
    for found in (one, other, far):
        ones = torch.stack([((found >> bit) & 1).double().mean() for bit in range(32)])
        assert bool(((ones - 0.5).abs() < 5 * 0.5 / count**0.5).all())
    assert (one == other).sum() < 5
    assert (one == far).sum() < 5


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "loops"),
    [
        ((12, 10), (3, 0), (4, 10), 1),
        ((12, 10), (0, 4), (12, 3), 2),
        ((12, 10), (3, 4), (5, 3), 2),
        ((4, 6, 5), (1, 0, 0), (2, 6, 5), 1),
        ((4, 6, 5), (0, 2, 0), (4, 3, 5), 2),
        ((4, 6, 5), (1, 2, 1), (2, 3, 2), 3),
        ((30,), (7,), (9,), 1),
    ],
)
def test_a_part_has_the_random_bits_that_it_has_in_the_whole(shape, offsets, sizes, loops):
    key, box = [3, 4], tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
    everything = bits_of(place_of([0] * len(shape), shape, shape), key).view(shape)
    place = place_of(offsets, sizes, shape)
    assert len(place) == loops
    assert torch.equal(bits_of(place, key).view(sizes), everything[box])


def test_small_changes_are_kept_only_by_stochastic_rounding(tmp_path):
    """With beta2 = 0.999, an averaged square that is 1 moves towards a square of 0.81 by 0.0002, a twentieth of the
    distance to the next bfloat16 below."""
    seen = {}
    for stochastic in (True, False):
        optimizer = AdamWBF16(betas=(0.9, 0.999), stochastic_rounding=stochastic, **EAGER)
        run = tiny_run(tmp_path, model=TinyModel(dim=64), optimizer=optimizer)
        weight = next(item.parameter for item in run.parameters if item.role == "matrix")
        weight.grad = torch.full_like(weight, 0.9)
        run.optimizer.step()
        run.optimizer.state[weight]["exp_avg_sq"].fill_(1.0)
        for _ in range(100):
            run.optimizer.step()
        seen[stochastic] = run.optimizer.state[weight]["exp_avg_sq"].double().mean().item()
    assert seen[False] == 1.0
    assert seen[True] == pytest.approx(0.81 + 0.19 * 0.999**100, abs=1e-3)


def test_to_nearest_is_torchaos_rounding(tmp_path):
    """torchao rounds moments to the nearest where it keeps them in bfloat16, which is with parameters in bfloat16."""
    run = tiny_run(tmp_path, optimizer=AdamWBF16(stochastic_rounding=False, lr=0.01, weight_decay=0, **EAGER))
    weight = next(item.parameter for item in run.parameters if item.role == "matrix")
    twin = torch.nn.Parameter(weight.detach().bfloat16())
    reference = TorchaoAdamW([twin], lr=0.01, betas=(0.9, 0.95), weight_decay=0)
    for step in range(3):
        weight.grad = draw("weight", weight.shape, step).bfloat16().float()
        twin.grad = weight.grad.bfloat16()
        run.optimizer.step()
        with torch.compiler.set_stance("force_eager"):
            reference.step()
    for slot in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(run.optimizer.state[weight][slot], reference.state[twin][slot])


# --- training ----------------------------------------------------------------------------------------------------


def test_8_bits_train_as_well_as_32(make_job, train, lines):
    settings = {"model": TinyModel(dim=64), "steps": 30, "global_batch_size": 16}
    full = lines(train(make_job(optimizer=TinyAdamW(lr=3e-3), job={"name": "full"}, **settings)))
    low = lines(train(make_job(optimizer=AdamW8bit(lr=3e-3, eps=1e-5, **EAGER), job={"name": "low"}, **settings)))
    assert full[-1]["loss"] < 0.7 * full[0]["loss"]
    assert low[-1]["loss"] == pytest.approx(full[-1]["loss"], rel=0.03)


def test_patterns_change_rates(make_job, build):
    run = build(make_job(optimizer=AdamW8bit(groups=(ParameterGroup(match="layers.0.*", lr=0.5),), **EAGER)))
    rates = {name: group["lr"] for group in run.optimizer.param_groups for name in group["names"]}
    assert (rates["layers.0.up.weight"], rates["layers.1.up.weight"]) == (0.5, 3e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plan_knows_the_size_of_the_moments(tmp_path, name):
    """Played on shapes, with the update that is compiled in a run."""
    optimizer = attrs.evolve(OPTIMIZERS[name], compile=True)
    settings = {"model": MODEL, "parallel": {"fsdp": FSDP()}, **SIZES}
    job = tiny_job(str(tmp_path), Catalog.installed(), optimizer=optimizer, **settings)
    leave_group()  # of an earlier test: a plan is made by a process of its own
    ranks = make_plan(job, Catalog.installed(), 4).ranks
    assert not ranks[0].failure
    run = tiny_run(tmp_path, optimizer=OPTIMIZERS[name], model=MODEL, **SIZES)
    for item in run.parameters:
        item.parameter.grad = torch.zeros_like(item.parameter)
    run.optimizer.step()
    moments = sum(t.nbytes for state in run.optimizer.state.values() for t in state.values() if t.ndim)
    assert ranks[0].optimizer == pytest.approx(moments / 4, rel=0.02)


def test_a_frozen_parameter_stays_and_trains_once_it_is_unfrozen(make_job, build):
    run = build(make_job(model=TinyModel(dim=64), optimizer=AdamW8bit(**EAGER)))
    items = {item.name: item.parameter for item in run.parameters}
    frozen_one, other = items["layers.0.up.weight"], items["layers.0.down.weight"]
    before = frozen_one.detach().clone(), other.detach().clone()
    other.grad = torch.ones_like(other)
    run.optimizer.step()
    assert torch.equal(frozen_one, before[0])
    assert not torch.equal(other, before[1])
    frozen_one.grad = torch.ones_like(frozen_one)
    run.optimizer.step()
    assert not torch.equal(frozen_one, before[0])


def test_a_pattern_that_fits_nothing_is_refused(make_job, build):
    with refuses("optimizer.exclude.0", "'embeding.*'", "'embedding.weight'"):
        build(make_job(optimizer=AdamW8bit(exclude=("embeding.*",))))


@pytest.mark.parametrize("size", [0, 4, 96])
def test_blocks_that_cannot_be_are_refused(size):
    with pytest.raises(ValueError, match=naming("power of two", 8, size)):
        AdamW4bit(block_size=size)


# --- without a job ---------------------------------------------------------------------------------------------------


MAKERS = {
    "8 bits": lambda params: QuantisedAdamW(params, EIGHT_BIT, lr=0.01, min_size=1, exclude=("1",), compile=False),
    "bf16": lambda params: BF16AdamW(params, lr=0.01, seed=3, compile=False),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_plain_tensors_are_stepped_like_named_ones(make):
    plain, named, reference = ([nn.Parameter(draw(f"{n}", (8, 64), 0).float()) for n in range(2)] for _ in range(3))
    optimizers = (
        make(plain),
        make([{"params": named, "names": ["0", "1"]}]),
        torch.optim.AdamW(reference, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
    )
    for step in range(3):
        for number, twins in enumerate(zip(plain, named, reference, strict=True)):
            for parameter in twins:
                parameter.grad = draw(f"gradient {number}", parameter.shape, step).float()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(plain, named, rtol=0, atol=0)
    torch.testing.assert_close(plain, reference, rtol=0, atol=5e-3)


def test_moments_of_another_format_are_not_continued():
    """As of another block size, or of an optimizer in float32."""
    parameter = nn.Parameter(torch.zeros(8, 64))
    named = [{"params": [parameter], "names": ["up.weight"]}]
    optimizer = QuantisedAdamW(named, EIGHT_BIT, lr=0.01, min_size=1, compile=False)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for slot, tensor in optimizer.state[parameter].items():
        empty = optimizer.empty_slot(parameter, slot, tensor.shape, tensor.dtype)
        assert (empty.shape, empty.dtype) == (tensor.shape, tensor.dtype)
        for size, dtype in ((torch.Size([7]), tensor.dtype), (tensor.shape, torch.int32)):
            with pytest.raises(CheckpointError, match=naming("up.weight", f"{slot}, {list(size)} of {dtype}")):
                optimizer.empty_slot(parameter, slot, size, dtype)
    with pytest.raises(CheckpointError, match=naming("up.weight", "exp_avg_cubed")):
        optimizer.empty_slot(parameter, "exp_avg_cubed", parameter.shape, parameter.dtype)


@pytest.mark.parametrize("component", [AdamW8bit, AdamWBF16], ids=lambda cls: cls.__name__)
def test_defaults_are_those_of_the_keys(component):
    """Of the class that is used without a job."""
    made = inspect.signature(LowBitAdamW).parameters
    keys = attrs.fields_dict(component)
    shared = [name for name in keys if name in made and made[name].default is not inspect.Parameter.empty]
    assert {"lr", "betas", "eps", "weight_decay", "compile"} <= {*shared}
    assert [made[name].default for name in shared] == [keys[name].default for name in shared]
