"""Stages under every layout: the curve of one process, the same parameters trained, and other layouts on resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from staged import Outcome, run, selected

from forge_plugin_compile import Compile
from forge_plugin_cross_attention import CrossAttention
from forge_plugin_freeze import Stage
from forge_plugin_mot import MixtureOfTransformers
from forge_plugin_parallel import FSDP, ActivationCheckpointing, TensorParallel
from forge_plugin_parallel.pp import splits_backward
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_plugin_vision import FusionComponent, Joint, VisionLanguage
from forge_testing import SplittableModel, TinyModel
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LayoutCase
from forge_testing.outcomes import Stop
from forge_testing.processes import run_on_ranks
from forge_testing.vision import RandomImages, tiny_language, tiny_vision

TP = TensorParallel(degree=2)
SMALL = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2))

IMAGES = (  # the adapter, the language model too, the vision part, all
    Stage(train=("vision.adapter.*",), steps=2),
    Stage(freeze=("vision.encoder.*",), steps=1),
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
            "steps": 5,
            "seq_len": 24,
            "data": {"sources": (RandomImages(text_only=2, held_out=5, has_entries=False),)},
        }
        for name, fusion in FUSIONS.items()
    },
}


def layout_of(micro_batch_size: int = 0, **parallel: dict[str, Any]) -> LayoutCase:
    return LayoutCase(ranks=2, parallel=parallel, micro_batch_size=micro_batch_size)


FSDP2, FSDP2_WHOLE_SHARE, TP2 = layout_of(2, fsdp={}), layout_of(fsdp={}), layout_of(tp={"degree": 2})
PP2 = layout_of(2, pp={"degree": 2})
LAYOUTS: dict[str, dict[str, LayoutCase]] = {
    "split": {
        "replicate2": layout_of(2),
        "fsdp2": FSDP2_WHOLE_SHARE,
        "fsdp2, accumulation": layout_of(2, fsdp={"reshard_after_forward": False, "reduce_every_micro_batch": True}),
        "pp2, idle-rank": PP2,
    },
    "both ends": {"pp2": PP2},
    "attention": {
        "fsdp2, checkpointing": layout_of(fsdp={}, activation_checkpointing={}),
        "tp2": TP2,
        "cp2": layout_of(cp={"degree": 2}),
    },
    "vision": {"fsdp2": FSDP2},
    "cross-attention": {"pp2": PP2},
    "mot": {"tp2": TP2},
}
if splits_backward(torch.__version__):
    LAYOUTS["both ends"]["pp2, zero-bubble"] = layout_of(2, pp={"degree": 2, "schedule": "interleaved_zero_bubble"})


def observation(name: str) -> Callable[[Path, Mapping[str, Any]], Outcome]:
    return lambda folder, changes: run(folder, **{**RUNS[name], **changes}) if changes else alone(name)


@cache
def alone(name: str) -> Outcome:
    with TemporaryDirectory() as folder:
        return run(Path(folder), **RUNS[name])


def same_training(ranks: Sequence[Outcome], expected: Outcome) -> None:
    """The curve of one process, and the same parameters with gradients, changes and state."""
    assert ranks[0].losses == pytest.approx(expected.losses, abs=1e-12)
    for number, step in enumerate(expected.steps):
        own = [rank.steps[number] for rank in ranks]
        for what in ("changed", "gradients", "state"):
            assert frozenset().union(*(getattr(one, what) for one in own)) == getattr(step, what), f"{number} {what}"
        assert [one.norm for one in own] == pytest.approx([step.norm] * 2, abs=1e-12)
    for rank in ranks:
        assert rank.weights.keys() == expected.weights.keys()
        for key, weight in expected.weights.items():
            torch.testing.assert_close(rank.weights[key], weight, rtol=0, atol=1e-11, msg=key)


test_layouts = layout_law(
    *(
        Case(name, observe=observation(name), compare=same_training, layouts=layouts)
        for name, layouts in LAYOUTS.items()
    )
)


def test_one_process_trains_what_the_stages_name():
    outcome = alone("split")
    assert [step.changed for step in outcome.steps] == selected(outcome)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_an_adapter_trains_first_and_the_encoder_last(fusion):
    outcome = alone(fusion)
    names = set(outcome.weights)
    vision = {name for name in names if name.startswith("vision.")}
    encoder = {name for name in vision if name.startswith("vision.encoder.")}
    wanted = [vision - encoder, vision - encoder, names - encoder, vision, names]
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
    run(tmp_path, hooks=[Stop(step=1)])

    def rest(rank: int) -> list[Outcome]:
        stop = [Stop(step=4)]
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
    """In one process and under `fsdp`, whose parameters torch never guards on: on one of the ranks, which is enough."""
    settings = {"stages": COMPILED, "steps": 3, "model": TinyModel()}
    stages = {"compile": Compile(backend="aot_eager")}
    fsdp = {"fsdp": FSDP()}
    expected = run(tmp_path, "eager", **settings)
    alone = run(tmp_path, "compiled", parallel=stages, **settings)
    on_ranks = ({**fsdp, **stages}, fsdp)
    sharded = run_on_ranks(2, lambda rank: run(tmp_path, "fsdp", parallel=on_ranks[rank], **settings))
    for outcome in (alone, *sharded):
        assert [step.changed for step in outcome.steps] == [step.changed for step in expected.steps]
        for name, weight in expected.weights.items():
            torch.testing.assert_close(outcome.weights[name], weight, rtol=0, atol=1e-11, msg=name)


def test_a_compiled_block_that_is_frozen_is_not_recomputed(tmp_path):
    """Torch fails to compile recomputation of a block, with attention in it, that has no backward pass."""
    stages = {"compile": Compile(backend="aot_eager"), "activation_checkpointing": ActivationCheckpointing()}
    outcome = run(tmp_path, stages=(Stage(train=("head.*",)),), steps=1, model=SMALL, parallel=stages)
    assert outcome.steps[0].changed == {"head.weight"}
