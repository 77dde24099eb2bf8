"""Stages under every layout: the curve of one process, the same parameters trained, and other layouts on resume."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from attrs import frozen
from staged import Outcome, StopAt, run, selected

from forge_plugin_compile import Compile
from forge_plugin_cross_attention import CrossAttention
from forge_plugin_freeze import Stage
from forge_plugin_mot import MixtureOfTransformers
from forge_plugin_parallel import FSDP, ActivationCheckpointing, ContextParallel, PipelineParallel, TensorParallel
from forge_plugin_parallel.pp import splits_backward
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_plugin_vision import FusionComponent, Joint, VisionLanguage
from forge_plugin_vision.testing import RandomImages, tiny_language, tiny_vision
from forge_testing import SplittableModel, TinyModel
from forge_testing.processes import run_on_ranks

TP = TensorParallel(degree=2)
SMALL = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2))


@frozen(kw_only=True)
class Row:
    """A layout of two ranks, and a run that one process makes too."""

    stages: dict[str, Any]
    micro_batch_size: int = 0
    run: str = "split"
    """Of `RUNS`."""


IMAGES = (  # the adapter, the language model too, the vision part, all
    Stage(train=("vision.adapter.*",), steps=2),
    Stage(freeze=("vision.encoder.*",), steps=2),
    Stage(train=("vision.*",), steps=1),
    Stage(),
)

FUSIONS: dict[str, FusionComponent] = {
    "vision": Joint(),
    "cross-attention": CrossAttention(gate_start=0.5, layers=(1,), heads=4, kv_heads=2),
    "mot": MixtureOfTransformers(),
}
RUNS: dict[str, dict[str, Any]] = {
    "split": {"model": SplittableModel()},
    "both ends": {
        "model": SplittableModel(layers=4),
        "stages": (Stage(train=("embedding.*", "head.*"), steps=3), Stage(freeze=("layers.0.*", "head.*"))),
    },
    "attention": {"model": SMALL},
    **{
        name: {
            "model": VisionLanguage(language=tiny_language(), vision=tiny_vision(), fusion=fusion),
            "stages": IMAGES,
            "seq_len": 24,
            "data": {"sources": (RandomImages(text_only=2, held_out=5, has_entries=False),)},
        }
        for name, fusion in FUSIONS.items()
    },
}
ROWS = {
    "replicate2": Row(stages={}, micro_batch_size=2),
    "fsdp2": Row(stages={"fsdp": FSDP()}),
    "fsdp2, accumulation": Row(
        stages={"fsdp": FSDP(reshard_after_forward=False, reduce_every_micro_batch=True)}, micro_batch_size=2
    ),
    "fsdp2, checkpointing": Row(
        stages={"fsdp": FSDP(), "activation_checkpointing": ActivationCheckpointing()}, run="attention"
    ),
    "tp2": Row(stages={"tp": TP}, run="attention"),
    "fsdp2, vision": Row(stages={"fsdp": FSDP()}, micro_batch_size=2, run="vision"),
    "pp2": Row(stages={"pp": PipelineParallel(degree=2)}, micro_batch_size=2, run="both ends"),
    "pp2, idle-rank": Row(stages={"pp": PipelineParallel(degree=2)}, micro_batch_size=2),
    "pp2, vision": Row(stages={"pp": PipelineParallel(degree=2)}, micro_batch_size=2, run="vision"),
    "fsdp2, cross-attention": Row(stages={"fsdp": FSDP()}, micro_batch_size=2, run="cross-attention"),
    "pp2, cross-attention": Row(stages={"pp": PipelineParallel(degree=2)}, micro_batch_size=2, run="cross-attention"),
    "fsdp2, mot": Row(stages={"fsdp": FSDP()}, micro_batch_size=2, run="mot"),
    "tp2, mot": Row(stages={"tp": TP}, run="mot"),
    "cp2": Row(stages={"cp": ContextParallel(degree=2)}, run="attention"),
}
if splits_backward(torch.__version__):
    ZERO_BUBBLE = PipelineParallel(degree=2, schedule="interleaved_zero_bubble")
    ROWS["pp2, zero-bubble"] = Row(stages={"pp": ZERO_BUBBLE}, micro_batch_size=2, run="both ends")


@cache
def alone(name: str) -> Outcome:
    return run(Path(mkdtemp()), **RUNS[name])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of every row the outcomes of both ranks; all rows in one pair of processes."""
    folder = tmp_path_factory.mktemp("rows")

    def rows(rank: int) -> dict[str, Outcome]:
        return {
            name: run(
                folder,
                name.replace(", ", "-"),
                parallel=row.stages,
                micro_batch_size=row.micro_batch_size,
                **RUNS[row.run],
            )
            for name, row in ROWS.items()
        }

    for row in ROWS.values():
        alone(row.run)
    return run_on_ranks(2, rows)


@pytest.mark.parametrize("name", ROWS)
def test_every_layout_trains_like_one_process(outcomes, name):
    expected, ranks = alone(ROWS[name].run), [outcome[name] for outcome in outcomes]
    assert ranks[0].losses == pytest.approx(expected.losses, abs=1e-12)
    for number, step in enumerate(expected.steps):
        own = [rank.steps[number] for rank in ranks]
        for what in ("changed", "gradients", "state"):
            assert frozenset().union(*(getattr(one, what) for one in own)) == getattr(step, what), f"{number} {what}"
        assert [one.norm for one in own] == pytest.approx([step.norm] * 2, abs=1e-12)
    weights = ranks[0].weights | ranks[1].weights
    assert weights.keys() == expected.weights.keys()
    for key, weight in expected.weights.items():
        torch.testing.assert_close(weights[key], weight, rtol=0, atol=1e-11, msg=key)


def test_one_process_trains_what_the_stages_name():
    outcome = alone("split")
    assert [step.changed for step in outcome.steps] == selected(outcome)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_an_adapter_trains_first_and_the_encoder_last(fusion):
    outcome = alone(fusion)
    names = set(outcome.weights)
    vision = {name for name in names if name.startswith("vision.")}
    encoder = {name for name in vision if name.startswith("vision.encoder.")}
    wanted = [vision - encoder, vision - encoder, names - encoder, names - encoder, vision, names, names]
    assert [step.changed for step in outcome.steps] == wanted


def test_what_ran_before_the_first_step_of_fsdp_leaves_no_trace(tmp_path):
    """Neither evaluations nor a dry run, which see what another stage trains.

    When a unit is first gathered, torch notes the dtype of its reduction by what trains then; and the gradient of a
    head that trains alone would stay in its gathered weights.
    """
    units = {"stages": (Stage(train=("layers.1.*",), steps=2), Stage()), "steps": 4, "precision": "bf16"}
    heads = {"stages": (Stage(train=("head.*",)),), "steps": 2}
    before = {"dry_run": "always", "eval": {"at_start": True}}

    def curves(rank: int) -> list[tuple[Outcome, Outcome]]:
        fsdp = {"parallel": {"fsdp": FSDP()}}
        return [
            (run(tmp_path, f"{n}a", **case, **fsdp), run(tmp_path, f"{n}b", **case, **fsdp, **before))
            for n, case in enumerate((units, heads))
        ]

    for plain, other in (pair for rank in run_on_ranks(2, curves) for pair in rank):
        assert plain.steps == other.steps
        assert all(torch.equal(plain.weights[name], weight) for name, weight in other.weights.items())


def test_a_run_continues_under_other_layouts_in_later_stages(tmp_path):
    """Its first checkpoint has optimizer state of one part, its second of two."""
    run(tmp_path, hooks=[StopAt(last=1)])

    def rest(rank: int) -> list[Outcome]:
        stop = [StopAt(last=4)]
        return [run(tmp_path, hooks=stop, parallel={"fsdp": FSDP()}), run(tmp_path, parallel={"tp": TP})]

    expected = alone("split")
    for fsdp, tp in run_on_ranks(2, rest):
        for actual, step in zip([*fsdp.steps, *tp.steps], expected.steps[1:], strict=True):
            assert (actual.changed, actual.state) == (step.changed, step.state)
        for name, weight in expected.weights.items():
            torch.testing.assert_close(tp.weights[name], weight, rtol=0, atol=1e-11, msg=name)
        assert not tp.losses or tp.losses == pytest.approx(expected.losses, abs=1e-12)


COMPILED = (Stage(train=("layers.1.*", "head.*"), steps=1), Stage(steps=1), Stage(train=("layers.0.*",)))


def test_compiled_blocks_are_compiled_anew_for_what_trains(tmp_path):
    """In one process and under `fsdp`, whose parameters torch never guards on."""
    expected = run(tmp_path, "eager", stages=COMPILED, steps=3, model=TinyModel())

    def compiled(rank: int) -> list[Outcome]:
        stages = {"compile": Compile(backend="aot_eager")}
        settings = {"stages": COMPILED, "steps": 3, "model": TinyModel()}
        return [
            run(tmp_path, "replicate", parallel=stages, **settings),
            run(tmp_path, "fsdp", parallel={"fsdp": FSDP(), **stages}, **settings),
        ]

    for outcome in (part for rank in run_on_ranks(2, compiled) for part in rank):
        assert [step.changed for step in outcome.steps] == [step.changed for step in expected.steps]
        for name, weight in expected.weights.items():
            torch.testing.assert_close(outcome.weights[name], weight, rtol=0, atol=1e-11, msg=name)


def test_a_compiled_block_that_is_frozen_is_not_recomputed(tmp_path):
    """Torch fails to compile recomputation of a block, with attention in it, that has no backward pass."""
    stages = {"compile": Compile(backend="aot_eager"), "activation_checkpointing": ActivationCheckpointing()}
    outcome = run(tmp_path, stages=(Stage(train=("head.*",)),), steps=1, model=SMALL, parallel=stages)
    assert outcome.steps[0].changed == {"head.weight"}
