"""Stages `fsdp`, `tp` and `cp` in whole runs, and what they refuse. Curves are in tests/parity."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from forge_core.contracts.errors import JobError
from forge_core.contracts.layout import Layout
from forge_core.engine.build import build_context, build_run
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_plugin_parallel import FSDP, ContextParallel, TensorParallel
from forge_plugin_parallel.fsdp_stage import _precision
from forge_plugin_parallel.tp_ways import Way
from forge_plugin_text import Bytes, Text
from forge_plugin_transformer import GroupedQueryAttention, MultiTokenPrediction, SwiGLU, Transformer
from forge_testing import Numbers, SplittableModel, TinyModel, job_problems, tiny_job
from forge_testing.processes import run_on_ranks

FSDP2 = {"fsdp": FSDP()}
TP2 = {"tp": TensorParallel(degree=2)}
STAYS = {"reshard_after_forward": False}
BOTH = {**FSDP2, **TP2}


def transformer(**keys):
    settings = {"vocab_size": 32, "dim": 16, "layers": 2, "attention": GroupedQueryAttention(heads=4, kv_heads=2)}
    return Transformer(**settings | keys)


def job(folder, stages, steps=2, **changes):
    settings = {"model": transformer(), "global_batch_size": 8, "precision": "fp64", "seq_len": 16}
    settings |= {"data": {"sources": (Numbers(held_out=5),)}, "eval": {"interval": 1}, "parallel": stages}
    return tiny_job(str(folder), None, steps=steps, **(settings | changes))


def train(*arguments, **changes):
    return Trainer(job(*arguments, **changes), echo=lambda text: None).run() and None


def records(folder):
    return [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]


def numbers(folder, *keys):
    return [record[key] for record in records(folder) for key in keys if key in record]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    train(folder, {}, steps=6)
    return numbers(folder, "loss", "grad_norm", "eval/loss")


@pytest.mark.parametrize("replicate", [1, 2])
def test_offloaded_to_the_host_it_trains_the_same(tmp_path, single, replicate):
    """Saved offloaded, resumed so, and resumed from by one process."""
    stages = {"fsdp": FSDP(offload=True, replicate=replicate)}
    for steps in (2, 4):
        run_on_ranks(2 * replicate, lambda rank, steps=steps: train(tmp_path, stages, steps=steps))
    train(tmp_path, {}, steps=6)
    assert numbers(tmp_path, "loss", "grad_norm", "eval/loss") == pytest.approx(single, rel=1e-9)


def test_offloading_is_torchs_and_says_where_parameters_are(tmp_path):
    def stage(rank):
        offloaded = job(tmp_path, {"fsdp": FSDP(offload=True)})
        run = build_run(offloaded, build_context(offloaded, Catalog.installed(), None))
        run.executor.evaluate([{"input_ids": torch.arange(16)[None], "labels": torch.arange(16)[None]}])
        [built] = run.built_stages
        group = run.model._get_fsdp_state()._fsdp_param_group
        return built.parameter_device, built.describe(), [p.offload_to_cpu for p in group.fsdp_params]

    for device, described, offloaded in run_on_ranks(2, stage):
        assert device == torch.device("cpu")
        assert described == "parameters split over 2 ranks; they, gradients and optimizer state on the host"
        assert offloaded
        assert all(offloaded)


def test_a_model_without_units_is_sharded_by_its_layers(tmp_path):
    for folder, stages, ranks in ((tmp_path / "a", {}, 1), (tmp_path / "b", FSDP2, 2)):
        run_on_ranks(ranks, lambda rank, f=folder, s=stages: train(f, s, model=TinyModel(layers=2)))
    found, expected = (numbers(tmp_path / name, "loss", "eval/loss") for name in "ba")
    assert found == pytest.approx(expected, rel=1e-9)


def test_in_half_precision_gradients_are_reduced_in_float32():
    for dtype, narrow in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)):
        policy = _precision(dtype, narrow)
        assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    for dtype in (torch.float32, torch.float64):
        assert _precision(dtype, narrow=False).reduce_dtype is None, "whatever the gradients have"


def test_weights_that_change_after_an_evaluation_are_seen(tmp_path):
    """No backward pass frees then what the forward pass has gathered: the head with the root, units that stay gathered,
    and what is gathered ahead for blocks that only train."""
    batch = {"input_ids": torch.arange(16)[None], "labels": torch.arange(16)[None]}

    def evaluated(**keys):
        trained = job(tmp_path, {"fsdp": FSDP(**keys)}, model=transformer(mtp=MultiTokenPrediction()))
        run = build_run(trained, build_context(trained, Catalog.installed(), None))
        return run, run.executor.evaluate([batch]).loss_sum.item()

    def zero(run, name):
        with torch.no_grad():
            next(item.parameter for item in run.parameters if item.name == name).zero_()  # as an optimizer has it

    def losses(rank):
        found = []
        for name, keys in (("head.weight", {}), ("layers.0.ffn.down.weight", STAYS)):
            run, before = evaluated(**keys)
            zero(run, name)
            found.append((before, run.executor.evaluate([batch]).loss_sum.item()))
        run, _ = evaluated(prefetch=1)
        zero(run, "mtp.blocks.0.norm.weight")
        run.context.auxiliary.begin_step(torch.tensor(32), 2, 2)
        run.executor.train_step([batch], torch.tensor(32.0).double())
        return found, run.context.auxiliary.totals()["mtp/loss"].item()

    for (head, layer), predicted in run_on_ranks(2, losses):
        assert head[1] == pytest.approx(16 * math.log(32)) != head[0]
        assert layer[1] != layer[0]
        assert predicted == pytest.approx(15 / 32 * math.log(32))


def test_half_precision_stays_close(tmp_path):
    for folder, stages, ranks in ((tmp_path / "a", {}, 1), (tmp_path / "b", FSDP2, 2)):
        run_on_ranks(ranks, lambda rank, f=folder, s=stages: train(f, s, precision="bf16"))
    found, expected = (numbers(tmp_path / name, "loss") for name in "ba")
    assert found == pytest.approx(expected, rel=2e-2)


class BadlyPlannedModel(SplittableModel):
    def build(self, context):
        model = super().build(context)
        model.tensor_parallel_plan = lambda: {"embedding": "vocab_embedding", "head": "diagonal"}
        return model


class PartsOfABias(Transformer):
    def build(self, context):
        model = super().build(context)
        way = Way("own_row", split={"weight": 1}, inside=True, bias=False)
        plan = {"layers.*.ffn.down": way, **model.tensor_parallel_plan()}
        model.tensor_parallel_plan = lambda: plan
        return model


class PairWithoutHolder(SplittableModel):
    """Nothing gathers what its pairs take, nor sums the gradients of it."""

    def build(self, context):
        model = super().build(context)
        plan = {name: way for name, way in model.tensor_parallel_plan().items() if way != "whole_input"}
        model.tensor_parallel_plan = lambda: plan
        return model


class NormInsideAPair(Transformer):
    def build(self, context):
        model = super().build(context)
        plan = {"layers.*.attention.q_norm": "sequence", **model.tensor_parallel_plan()}
        model.tensor_parallel_plan = lambda: plan
        return model


class UnnamedMixers(Transformer):
    """The attention of the second layer does not say that it mixes positions."""

    def build(self, context):
        model = super().build(context)
        mixers = {name: heads for name, heads in model.sequence_mixers().items() if not name.startswith("layers.1")}
        model.sequence_mixers = lambda: mixers
        return model


class TestWhatIsRefused:
    @pytest.mark.parametrize("sequence_parallel", [True, False])
    def test_split_modules_without_one_around_them_that_has_all_positions(self, tmp_path, sequence_parallel):
        stages = {"tp": TensorParallel(degree=2, sequence_parallel=sequence_parallel)}
        assert job_problems(job(tmp_path, stages, model=PairWithoutHolder()), 2) == [
            f"parallel.tp: the plan of SplittableNetwork has {way} for 'layers.0.pair.{name}', and whole_input for no "
            "module around it; name the module that calls it whole_input"
            for name, way in (("up", "column"), ("down", "row"))
        ]

    def test_whole_weights_at_rest_inside_a_pair(self, tmp_path):
        attention = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True)
        model = NormInsideAPair(vocab_size=32, dim=16, layers=2, attention=attention)
        [problem] = job_problems(job(tmp_path, TP2, model=model), 2)
        assert problem == (
            "parallel.tp: the plan of TransformerModel has sequence for 'layers.0.attention.q_norm', inside "
            "'layers.0.attention', which has all positions; take replicate"
        )

    def test_a_layer_that_does_not_name_what_mixes_its_positions(self, tmp_path):
        model = UnnamedMixers(vocab_size=32, dim=16, layers=3)
        [problem] = job_problems(job(tmp_path, {"cp": ContextParallel(degree=2)}, model=model), 2)
        assert problem == (
            "parallel.cp: TransformerModel.sequence_mixers() names none in layers.1, so each position would see those "
            "of its own rank only; name what mixes positions there, or leave the stage out"
        )

    def test_a_model_without_a_plan(self, tmp_path):
        [problem] = job_problems(job(tmp_path, TP2, model=TinyModel(layers=2)), 2)
        assert problem.startswith(
            "parallel.tp: TinyNetwork has no tensor_parallel_plan(), so it cannot be split; leave"
        )

    def test_sizes_that_do_not_divide(self, tmp_path):
        found = job_problems(job(tmp_path, TP2, model=transformer(vocab_size=31, ffn=SwiGLU(hidden=33))), 2)
        sizes = [
            "embedding.weight has 31 rows",
            "layers.0.ffn.gate.weight has 33 rows",
            "layers.0.ffn.up.weight has 33 rows",
            "layers.0.ffn.down.weight has 33 columns",
            "head.weight has 31 rows",
        ]
        fix = "which 2 ranks cannot share equally; change one of them"
        assert found == [f"parallel.tp.degree: {seen}, {fix}" for seen in sizes]
        assert not job_problems(job(tmp_path, TP2, model=transformer(vocab_size=32, ffn=SwiGLU(hidden=34))), 2)

    def test_a_vocabulary_that_is_the_tokenizers(self, tmp_path):
        text = tmp_path / "text.txt"
        text.write_text("some text")
        data = {"sources": (Text(path=str(text)),), "tokenizer": Bytes()}
        found = job_problems(job(tmp_path, TP2, model=transformer(vocab_size=0), data=data), 2)
        assert [problem.partition(",")[0] for problem in found] == [
            "parallel.tp.degree: embedding.weight has 257 rows",
            "parallel.tp.degree: head.weight has 257 rows",
        ]

    def test_a_plan_that_leaves_a_module_out(self, tmp_path):
        found = job_problems(job(tmp_path, TP2, model=BadlyPlannedModel()), 2)
        assert found == [
            "parallel.tp: the plan of SplittableNetwork has diagonal; there are column, row, partial_row, "
            "column_stack, vocab_embedding, vocab_head, sequence, replicate, partial, whole_input, partial_output, "
            "split_features",
            "parallel.tp: the plan of SplittableNetwork does not name 'layers.0.pair.up', which has parameters",
            "parallel.tp: the plan of SplittableNetwork does not name 'layers.0.pair.down', which has parameters",
            "parallel.tp: the plan of SplittableNetwork does not name 'norm', which has parameters",
        ]

    def test_a_bias_that_every_rank_would_add(self, tmp_path):
        sizes = {"vocab_size": 32, "dim": 16, "layers": 2, "attention": GroupedQueryAttention(heads=4, kv_heads=2)}
        [problem] = job_problems(job(tmp_path, TP2, model=PartsOfABias(ffn=SwiGLU(hidden=34, bias=True), **sizes)), 2)
        assert problem == (
            "parallel.tp: the plan of TransformerModel has own_row for 'layers.0.ffn.down', whose bias each rank "
            "would add; take row, or leave the bias out"
        )
        assert not job_problems(job(tmp_path, TP2, model=PartsOfABias(ffn=SwiGLU(hidden=34), **sizes)), 2)

    def test_they_are_refused_too_by_ranks_that_were_not_checked(self, tmp_path):
        """All that stages have to say, at once."""
        stages = {**TP2, "cp": ContextParallel(degree=2, method="ulysses")}

        def build(rank):
            with pytest.raises(JobError) as caught:
                train(tmp_path, stages, model=transformer(vocab_size=33))
            return [problem.path for problem in caught.value.problems]

        assert run_on_ranks(4, build) == [["parallel.tp.degree", "parallel.tp.degree", "parallel.cp.method"]] * 4

    def test_a_sequence_that_does_not_divide(self, tmp_path):
        stage = TensorParallel(degree=3)
        [problem] = stage.problems(job(tmp_path, {}), Layout(tp=3))
        assert str(problem).startswith("degree: 3 does not divide train.seq_len = 16; change one, or set sequence_")
        assert not list(TensorParallel(degree=3, sequence_parallel=False).problems(job(tmp_path, {}), Layout(tp=3)))

    def test_reducing_every_one_of_one(self, tmp_path):
        [problem] = FSDP(reduce_every_micro_batch=True).problems(job(tmp_path, {}), Layout(shard=2))
        assert str(problem).startswith("reduce_every_micro_batch: each rank has one micro-batch a step")

    def test_a_model_that_does_not_say_what_mixes_positions(self, tmp_path):
        [problem] = job_problems(job(tmp_path, {"cp": ContextParallel(degree=2)}, model=TinyModel(layers=2)), 2)
        assert problem.startswith("parallel.cp: TinyNetwork has no sequence_mixers(), so its sequences cannot be split")

    def test_pieces_that_do_not_divide(self, tmp_path):
        trained = job(tmp_path, {})
        [problem] = ContextParallel(degree=16).problems(trained, Layout(cp=16))
        assert str(problem) == "degree: 32 pieces do not divide train.seq_len = 16; change one of them"
        [problem] = ContextParallel(degree=4).problems(trained, Layout(cp=4, tp=4))
        assert "8 pieces x tp 4 = 32 do not divide" in str(problem)
        assert not list(ContextParallel(degree=16, method="ulysses").problems(trained, Layout(cp=16)))

    def test_heads_that_cannot_be_exchanged(self, tmp_path):
        stages = {"cp": ContextParallel(degree=2, method="ulysses")}
        model = transformer(attention=GroupedQueryAttention(heads=4, kv_heads=1))
        [problem] = job_problems(job(tmp_path, stages, model=model), 2)
        assert problem == (
            "parallel.cp.method: the model has 1 key/value heads, which 2 ranks cannot share equally; "
            'take "ring" or "all_gather", or another degree'
        )
        [problem] = job_problems(job(tmp_path, {**stages, **TP2}), 4)
        assert "each of 2 tensor-parallel ranks has 1 key/value heads, which 2 ranks cannot share" in problem
        assert not job_problems(job(tmp_path, stages), 2)
