"""Stages `fsdp`, `tp` and `cp` in whole runs, and what they refuse. Curves are in tests/parity."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from attrs import evolve, frozen

from forge_core.contracts.errors import JobError
from forge_core.contracts.layout import Layout, MeshDimension
from forge_core.engine.build import build_context, build_run
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_plugin_parallel import FSDP, ContextParallel, TensorParallel
from forge_plugin_parallel.fsdp_stage import _precision
from forge_plugin_parallel.tp_ways import Way
from forge_plugin_text import Bytes, Text
from forge_plugin_transformer import GroupedQueryAttention, MultiTokenPrediction, SwiGLU, Transformer
from forge_testing import Numbers, SplittableModel, TinyAdamW, TinyModel, job_problems, tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, lacks, problems_of

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
        assert not lacks(described, 2, "host")
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
        assert not policy.cast_forward_inputs, "a module decides the dtypes of its inputs"
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


@frozen(kw_only=True)
class InBF16(TinyAdamW):
    """An optimizer of parameters in bf16."""

    parameter_dtype: ClassVar = "bf16"


class TestWhatIsRefused:
    @pytest.mark.parametrize("sequence_parallel", [True, False])
    def test_split_modules_without_one_around_them_that_has_all_positions(self, tmp_path, sequence_parallel):
        stages = {"tp": TensorParallel(degree=2, sequence_parallel=sequence_parallel)}
        check_problems(
            problems_of(job(tmp_path, stages, model=PairWithoutHolder()), 2),
            at("parallel.tp", "SplittableNetwork", "column", "'layers.0.pair.up'", "whole_input"),
            at("parallel.tp", "SplittableNetwork", "row", "'layers.0.pair.down'", "whole_input"),
        )

    def test_whole_weights_at_rest_inside_a_pair(self, tmp_path):
        attention = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True)
        model = NormInsideAPair(vocab_size=32, dim=16, layers=2, attention=attention)
        names = ("TransformerModel", "sequence", "'layers.0.attention.q_norm'", "'layers.0.attention'", "replicate")
        check_problems(problems_of(job(tmp_path, TP2, model=model), 2), at("parallel.tp", *names))

    def test_a_layer_that_does_not_name_what_mixes_its_positions(self, tmp_path):
        model = UnnamedMixers(vocab_size=32, dim=16, layers=3)
        problems = problems_of(job(tmp_path, {"cp": ContextParallel(degree=2)}, model=model), 2)
        check_problems(problems, at("parallel.cp", "TransformerModel.sequence_mixers()", "layers.1"))

    def test_a_model_without_a_plan(self, tmp_path):
        problems = problems_of(job(tmp_path, TP2, model=TinyModel(layers=2)), 2)
        check_problems(problems, at("parallel.tp", "TinyNetwork", "tensor_parallel_plan()"))

    def test_sizes_that_do_not_divide(self, tmp_path):
        sizes = [
            ("embedding.weight", "31 rows"),
            ("layers.0.ffn.gate.weight", "33 rows"),
            ("layers.0.ffn.up.weight", "33 rows"),
            ("layers.0.ffn.down.weight", "33 columns"),
            ("head.weight", "31 rows"),
        ]
        check_problems(
            problems_of(job(tmp_path, TP2, model=transformer(vocab_size=31, ffn=SwiGLU(hidden=33))), 2),
            *(at("parallel.tp.degree", name, size, "2 ranks") for name, size in sizes),
        )
        assert not job_problems(job(tmp_path, TP2, model=transformer(vocab_size=32, ffn=SwiGLU(hidden=34))), 2)

    def test_a_vocabulary_that_is_the_tokenizers(self, tmp_path):
        text = tmp_path / "text.txt"
        text.write_text("some text")
        data = {"sources": (Text(path=str(text)),), "tokenizer": Bytes()}
        check_problems(
            problems_of(job(tmp_path, TP2, model=transformer(vocab_size=0), data=data), 2),
            at("parallel.tp.degree", "embedding.weight", "257 rows"),
            at("parallel.tp.degree", "head.weight", "257 rows"),
        )

    def test_a_plan_that_leaves_a_module_out(self, tmp_path):
        of_model = "SplittableNetwork"
        ways = "column, row, partial_row, column_stack, vocab_embedding, vocab_head, sequence, replicate, partial"
        check_problems(
            problems_of(job(tmp_path, TP2, model=BadlyPlannedModel()), 2),
            at("parallel.tp", of_model, "diagonal", f"{ways}, whole_input, partial_output, split_features"),
            at("parallel.tp", of_model, "'layers.0.pair.up'"),
            at("parallel.tp", of_model, "'layers.0.pair.down'"),
            at("parallel.tp", of_model, "'norm'"),
        )

    def test_a_bias_that_every_rank_would_add(self, tmp_path):
        sizes = {"vocab_size": 32, "dim": 16, "layers": 2, "attention": GroupedQueryAttention(heads=4, kv_heads=2)}
        problems = problems_of(job(tmp_path, TP2, model=PartsOfABias(ffn=SwiGLU(hidden=34, bias=True), **sizes)), 2)
        check_problems(problems, at("parallel.tp", "TransformerModel", "own_row", "'layers.0.ffn.down'", "bias", "row"))
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
        problems = stage.problems(job(tmp_path, {}), Layout(tp=3))
        check_problems(problems, at("degree", 3, "train.seq_len = 16", "sequence_parallel = false"))
        assert not list(TensorParallel(degree=3, sequence_parallel=False).problems(job(tmp_path, {}), Layout(tp=3)))

    def test_reducing_every_one_of_one(self, tmp_path):
        problems = FSDP(reduce_every_micro_batch=True).problems(job(tmp_path, {}), Layout(shard=2))
        check_problems(problems, at("reduce_every_micro_batch", "one micro-batch"))
        two = job(tmp_path, {}, micro_batch_size=1)
        assert not list(FSDP(reduce_every_micro_batch=True).problems(two, Layout(shard=2)))

    def test_reducing_every_one_where_they_overlap_or_add_up_in_bf16(self, tmp_path):
        stage, two = FSDP(reduce_every_micro_batch=True), job(tmp_path, {}, micro_batch_size=1)
        problems = stage.problems(two, Layout(pp=2, shard=2))
        check_problems(problems, at("reduce_every_micro_batch", "pipeline"))
        problems = stage.problems(evolve(two, optimizer=InBF16()), Layout(shard=2))
        check_problems(problems, at("reduce_every_micro_batch", "bf16"))

    def test_copies_inside_of_another_dimension(self, tmp_path):
        """Gradients are summed over the copies last, so these must be outermost."""

        def problems(order):
            outer = MeshDimension("outer", samples=True, order=order)
            return FSDP(replicate=2).problems(job(tmp_path, {}), Layout([outer], outer=2, replicate=2, shard=2))

        check_problems(problems(5), at("replicate", "outer"))
        check_problems(problems(15))

    def test_a_model_that_does_not_say_what_mixes_positions(self, tmp_path):
        problems = problems_of(job(tmp_path, {"cp": ContextParallel(degree=2)}, model=TinyModel(layers=2)), 2)
        check_problems(problems, at("parallel.cp", "TinyNetwork", "sequence_mixers()"))

    def test_pieces_that_do_not_divide(self, tmp_path):
        trained = job(tmp_path, {})
        problems = ContextParallel(degree=16).problems(trained, Layout(cp=16))
        check_problems(problems, at("degree", "32 pieces", "train.seq_len = 16"))
        problems = ContextParallel(degree=4).problems(trained, Layout(cp=4, tp=4))
        check_problems(problems, at("degree", "8 pieces x tp 4 = 32", "train.seq_len = 16"))
        assert not list(ContextParallel(degree=16, method="ulysses").problems(trained, Layout(cp=16)))

    def test_heads_that_cannot_be_exchanged(self, tmp_path):
        stages = {"cp": ContextParallel(degree=2, method="ulysses")}
        model = transformer(attention=GroupedQueryAttention(heads=4, kv_heads=1))
        ways = ("1 key/value heads", '"ring"', '"all_gather"')
        problems = problems_of(job(tmp_path, stages, model=model), 2)
        check_problems(problems, at("parallel.cp.method", "2 ranks", *ways))
        problems = problems_of(job(tmp_path, {**stages, **TP2}), 4)
        check_problems(problems, at("parallel.cp.method", "2 tensor-parallel ranks", *ways))
        assert not job_problems(job(tmp_path, stages), 2)
