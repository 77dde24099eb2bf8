"""The stage `pp`: where models are cut, what goes through a pipeline besides the loss, and what is refused. Curves are
in tests/parity."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import nullcontext
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from attrs import frozen
from torch import nn

from forge_core.contracts.components import LossComponent
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.contracts.layout import Layout
from forge_core.contracts.model import Model
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_run
from forge_core.engine.step import Stepper, metrics
from forge_core.losses import CrossEntropy
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.trained_model import load_model
from forge_plugin_parallel import FSDP, ActivationCheckpointing, PipelineParallel, pipeline_executor
from forge_plugin_parallel.cuts import balance, ranks_of, sections
from forge_plugin_parallel.pipeline_executor import _StageModule, _Step
from forge_plugin_parallel.pp import SPLIT_BACKWARD, V_SHAPED, splits_backward
from forge_plugin_transformer import GroupedQueryAttention, MultiTokenPrediction, Transformer
from forge_testing import Numbers, PenalisedModel, TinyModel, job_problems, tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, lacks, naming, problems_of
from forge_testing.runs import advance
from forge_testing.tiny_model import TinyNetwork

SPLITS = splits_backward(torch.__version__)
splitting = pytest.mark.skipif(not SPLITS, reason="this torch does not divide backward passes")
SCHEDULES = {name: build for name, build in pipeline_executor.SCHEDULES.items() if SPLITS or name not in SPLIT_BACKWARD}


def pp(schedule="1f1b", **keys):
    return {"pp": PipelineParallel(degree=2, schedule=schedule, **keys)}


def job(folder, stages, **changes):
    settings = {"model": TinyModel(layers=4), "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp64"}
    settings |= {"data": {"sources": (Numbers(held_out=5, ignored=7),)}, "parallel": stages}
    return tiny_job(str(folder), None, **(settings | changes))


def built(job):
    return build_run(job, build_context(job, Catalog.installed(), None))


class EncodingNetwork(TinyNetwork):
    """Of seven FLOPs four are those of its layers, and `embed` those of its encoder."""

    def flops(self, seq_len):
        return 7.0

    def layer_flops(self, seq_len):
        return [1.0] * 4

    def embed_flops(self, seq_len):
        return self.encoder_flops


@frozen(kw_only=True)
class EncodingModel(TinyModel):
    embed: float

    def build(self, context):
        model = EncodingNetwork(self.dim, self.layers, 0.0, 32, context.dtype)
        model.encoder_flops = self.embed
        return model


@frozen(kw_only=True)
class EndlessModel(TinyModel):
    def build(self, context):
        model = TinyNetwork(self.dim, self.layers, 0.0, 32, context.dtype)
        return Endless(model)


class Endless(Model):
    def __init__(self, model):
        super().__init__()
        self.layers, self.head = model.layers, model.head


class Widening(nn.Module):
    def forward(self, carry, batch):
        return (torch.cat([*carry, *carry], -1),)


@frozen(kw_only=True)
class WideningModel(TinyModel):
    def build(self, context):
        model = TinyNetwork(self.dim, self.layers, 0.0, 32, context.dtype)
        model.layers["1"] = Widening()
        return model


class Aside(nn.Module):
    """A layer that makes a second tensor, which no other looks at."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, carry, batch):
        (x,) = self.layer(carry[:1], batch)
        return x, 2 * x


class AsideNetwork(TinyNetwork):
    def embed(self, batch):
        (x,) = super().embed(batch)
        return x, 2 * x

    def finish(self, carry, batch):
        return super().finish(carry[:1], batch)


@frozen(kw_only=True)
class AsideModel(TinyModel):
    def build(self, context):
        model = AsideNetwork(self.dim, self.layers, 0.0, 32, context.dtype)
        for name, layer in model.layers.items():
            model.layers[name] = Aside(layer)
        return model


PREDICTING = Transformer(
    vocab_size=32,
    dim=16,
    layers=4,
    tie_embeddings=True,
    attention=GroupedQueryAttention(heads=2),
    mtp=MultiTokenPrediction(),
)
"""Its last stage has the table twice."""


def gradients_and_metrics(job):
    run = built(job)
    loader = TrainLoader(job, run.datasets, run.context)
    batches = loader.next_step()
    loader.close()
    stepper = Stepper(run)
    _, sums = stepper.gradients(batches, 0)
    numbers = {name: value.item() for name, value in metrics(sums).items()}
    return {item.name: item.parameter.grad for item in run.parameters}, {**numbers, "norm": stepper.norm().item()}


class TestAuxiliary:
    @pytest.mark.parametrize("recomputed", [False, True])
    def test_what_layers_attach_counts_as_in_one_process(self, tmp_path, recomputed):
        again = {"activation_checkpointing": ActivationCheckpointing()} if recomputed else {}
        stages = [pp(schedule) | again for schedule in SCHEDULES]
        model = PenalisedModel(layers=4)
        found = run_on_ranks(2, lambda rank: [gradients_and_metrics(job(tmp_path, s, model=model)) for s in stages])
        gradients, numbers = gradients_and_metrics(job(tmp_path, {}, model=model))
        for schedule, *ranks in zip(SCHEDULES, *found, strict=True):
            seen = {}
            for own, reported in ranks:
                seen |= own
                assert reported == pytest.approx(numbers, rel=1e-12), schedule
            assert seen.keys() == gradients.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(seen[name], gradient, rtol=1e-10, atol=1e-13, msg=f"{schedule}: {name}")


@splitting
def test_a_block_is_recomputed_for_its_input_and_for_all_weights_at_once(tmp_path):
    wanted = job(tmp_path, pp("zbv") | {"activation_checkpointing": ActivationCheckpointing()})

    def times(rank):
        run, calls = built(wanted), Counter()
        for name, layer in run.model.layers.items():
            layer.up.register_forward_hook(lambda *_, name=name: calls.update([name]))
        advance(run, 1)
        return calls

    calls = sum(run_on_ranks(2, times), Counter())
    micro_batches = 4
    assert max(calls.values()) == 3 * micro_batches
    assert calls["0"] == 2 * micro_batches, "nobody wants the gradient of the first stage's input"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_micro_batches_are_run_rightly_or_job_problems(tmp_path, count):
    sizes = {"global_batch_size": 2 * count, "micro_batch_size": 2}
    layout, plain = Layout(pp=2), job(tmp_path, {}, **sizes)
    allowed = [schedule for schedule in SCHEDULES if not list(pp(schedule)["pp"].problems(plain, layout))]
    refused = {1: {"1f1b", "dualpipe_v"}, 2: {"dualpipe_v"}, 3: {"dualpipe_v"}}[count]
    assert set(SCHEDULES) - set(allowed) == refused & set(SCHEDULES)
    stages = [pp(schedule) for schedule in allowed]
    found = run_on_ranks(2, lambda rank: [gradients_and_metrics(job(tmp_path, s, **sizes))[1] for s in stages])
    expected = gradients_and_metrics(plain)[1]
    for schedule, *ranks in zip(allowed, *found, strict=True):
        assert ranks == [pytest.approx(expected, rel=1e-12)] * 2, schedule


def test_what_travels_may_have_no_gradient(tmp_path):
    """Across ranks, and between two stages of one, as `zbv` has them."""
    model = AsideModel(layers=4)
    jobs = [job(tmp_path, pp(schedule), model=model) for schedule in ("1f1b", "zbv") if schedule in SCHEDULES]
    expected = gradients_and_metrics(job(tmp_path, {}, model=model))[1]
    for numbers in run_on_ranks(2, lambda rank: [gradients_and_metrics(wanted)[1] for wanted in jobs]):
        assert numbers == [pytest.approx(expected, rel=1e-12)] * len(jobs)


def test_nothing_that_stages_receive_stays(tmp_path):
    jobs = [job(tmp_path, pp(schedule), global_batch_size=16) for schedule in SCHEDULES]
    carry = torch.Size((2, jobs[0].train.seq_len, jobs[0].model.dim))

    def left(wanted):
        run = built(wanted)
        Stepper(run).gradients(TrainLoader(wanted, run.datasets, run.context).next_step(), 0)
        gc.collect()
        tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor]
        assert run.executor is not None  # and with it, its schedules
        return sum(tensor.shape == carry and not tensor.is_meta for tensor in tensors)

    found = run_on_ranks(2, lambda rank: [left(wanted) for wanted in jobs])
    assert found == [[0] * len(jobs)] * 2


def torch_schedule(stage, count):
    """Torch's schedule for the first rank, around stand-ins of its stages."""
    owners = ranks_of(stage.stages, stage.degree, stage.schedule in V_SHAPED)
    settings = {"num_stages": stage.stages, "group_size": stage.degree, "group_rank": 0, "submod": None}
    own = [SimpleNamespace(stage_index=n, **settings) for n, rank in enumerate(owners) if rank == 0]
    return SCHEDULES[stage.schedule](own[0] if len(own) == 1 else own, count, loss_fn=torch.add)


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_refused_is_what_torch_refuses(tmp_path, schedule, degree):
    stage = PipelineParallel(degree=degree, schedule=schedule)
    for count in range(1, 13):
        wanted = job(tmp_path, {}, global_batch_size=2 * count, model=TinyModel(layers=12))
        allowed = not list(stage.problems(wanted, Layout(pp=degree)))
        with nullcontext() if allowed else pytest.raises(ValueError, match=r"(?i)number of microbatches|as many micro"):
            torch_schedule(stage, count)


FREE_OF_NUMBER = sorted(SCHEDULES.keys() & {"interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs"})
"""Schedules whose stages per rank can be chosen."""


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [*((name, 0) for name in SCHEDULES), *((name, 3) for name in FREE_OF_NUMBER)],
)
def test_as_many_micro_batches_are_alive_as_torch_orders_them(schedule, degree, stages_per_rank):
    stage = PipelineParallel(degree=degree, schedule=schedule, stages_per_rank=stages_per_rank)
    for count in (2 * degree, 4 * degree):
        found = torch_schedule(stage, count)
        order = getattr(found, "pipeline_order", None) or found._get_pipeline_order()
        most = max(most_alive(actions) for actions in order.values()) / (stage.stages // degree)
        assert stage.micro_batches_alive(count) == most


def most_alive(actions):
    """Forward passes whose gradients are not complete yet, at the most."""
    alive, most = 0, 0
    for action in filter(None, actions):
        for part in action.sub_actions or [action]:
            kind = part.computation_type.name
            alive += {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}.get(kind, 0)
            most = max(most, alive)
    return most


class TestCuts:
    @pytest.mark.parametrize("stages", [1, 2, 3, 4])
    @pytest.mark.parametrize("costs", [(1, 1, 1, 1, 1), (5, 1, 1, 1, 3, 2), (1, 2, 3, 4), (2, 2, 9, 1, 1, 1, 4)])
    @pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 3), (4, 0), (2, 3)])
    def test_no_other_way_is_better(self, costs, stages, first, last):
        def stage_costs(counts):
            found = [sum(costs[cut.start : cut.stop]) for cut in slices(counts)]
            found[0] += first
            return [*found[:-1], found[-1] + last]

        def slices(counts):
            starts = [sum(counts[:number]) for number in range(len(counts))]
            return [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]

        def worth(counts):
            return max(stage_costs(counts)), sum(cost**2 for cost in stage_costs(counts))

        ways = combinations(range(1, len(costs)), stages - 1)
        every = [[b - a for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True)] for cuts in ways]
        assert worth(balance(costs, stages, first, last)) == min(map(worth, every))

    def test_a_large_head_takes_layers_from_the_last_stage(self):
        assert balance([1.0] * 8, 2, last=2.0) == [5, 3]

    @pytest.mark.parametrize(("embed", "cut"), [(3.0, "1, 3"), (0.0, "3, 1")])
    def test_what_a_model_computes_before_or_after_its_layers_takes_layers_from_there(self, tmp_path, embed, cut):
        wanted = job(tmp_path, pp(), model=EncodingModel(layers=4, embed=embed))
        stages = run_on_ranks(2, lambda rank: built(wanted).built_stages[0].describe())
        assert stages == [f"1f1b, stages of {cut} layers"] * 2

    def test_sections_hold_every_layer_once_and_know_the_ends(self):
        found = sections("abcde", [2, 1, 2])
        assert [section.layers for section in found] == [("a", "b"), ("c",), ("d", "e")]
        assert [(section.first, section.last) for section in found] == [(True, False), (False, False), (False, True)]

    def test_the_plan_tells_the_cuts(self, tmp_path):
        stages = run_on_ranks(2, lambda rank: built(job(tmp_path, pp(layers=(1, 3)))).built_stages[0].describe())
        assert stages == ["1f1b, stages of 1, 3 layers"] * 2

    def test_stages_go_round_or_there_and_back(self):
        assert ranks_of(6, 3, v_shaped=False) == [0, 1, 2, 0, 1, 2]
        assert ranks_of(6, 3, v_shaped=True) == [0, 1, 2, 2, 1, 0]

    @pytest.mark.parametrize(
        ("stage", "own"), [(pp(), "012"), (pp(layers=(1, 3)), "0"), pytest.param(pp("zbv"), "03", marks=splitting)]
    )
    def test_a_rank_has_its_layers_alone(self, tmp_path, stage, own):
        model = TinyModel(layers=4, dim=4)  # the head weighs as much as two layers
        found = run_on_ranks(2, lambda rank: list(built(job(tmp_path, stage, model=model)).model.layers))
        assert "".join(found[0]) == own
        assert sorted(found[0] + found[1]) == list("0123")


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"layers": (4, 4, 4)}, at("parallel.pp.layers", "3 entries", "2 stages")),
            ({"layers": (4, 4)}, at("parallel.pp.layers", "8 layers", 12)),
            ({"degree": 16, "schedule": "gpipe"}, at("parallel.pp.degree", "16 stages", "12 layers")),
            ({"stages_per_rank": 2}, at("parallel.pp.stages_per_rank", 2, "1f1b", 1)),
            pytest.param(
                {"schedule": "zbv", "stages_per_rank": 1},
                at("parallel.pp.stages_per_rank", 1, "zbv", 2),
                marks=splitting,
            ),
            pytest.param(
                {"schedule": "dualpipe_v", "degree": 4},
                at("parallel.pp.schedule", "dualpipe_v", "8 stages", 4),
                marks=splitting,
            ),
        ],
    )
    def test_settings_that_contradict_each_other(self, tmp_path, keys, expected):
        stage = PipelineParallel(**{"degree": 2} | keys)
        check_problems(problems_of(job(tmp_path, {"pp": stage}, model=TinyModel(layers=12)), stage.degree), expected)

    def test_micro_batches_that_make_no_rounds(self, tmp_path):
        stage = PipelineParallel(degree=2, schedule="interleaved_1f1b")
        problems = stage.problems(job(tmp_path, {}, global_batch_size=10), Layout(pp=2))
        check_problems(problems, at("schedule", "5 micro-batches", "2 equal rounds", "interleaved_1f1b"))

    def test_a_torch_that_cannot_divide_the_backward_pass(self, tmp_path, monkeypatch):
        monkeypatch.setattr("forge_plugin_parallel.pp.version", lambda name: "2.11.0+cu130")
        assert not job_problems(job(tmp_path, pp("1f1b")), 2)
        problems = problems_of(job(tmp_path, pp("zbv")), 2)
        check_problems(problems, at("parallel.pp.schedule", "zbv", "torch 2.11.0+cu130"))

    def test_resharding_between_the_two_parts_of_a_backward_pass(self, tmp_path):
        fsdp, layout = FSDP(reshard_after_forward=True), Layout(pp=2, shard=2)
        problems = fsdp.problems(job(tmp_path, pp("zbv")), layout)
        check_problems(problems, at("reshard_after_forward", "parallel.pp"))
        assert list(fsdp.problems(job(tmp_path, pp("1f1b")), layout)) == []

    @pytest.mark.parametrize(
        ("model", "stage", "expected"),
        [
            pytest.param(
                TinyModel(layers=3),
                pp("zbv"),
                at("parallel.pp.degree", "4 stages", "3 layers", "stages_per_rank"),
                marks=splitting,
            ),
            (TinyModel(layers=4), pp(layers=(2, 3)), at("parallel.pp.layers", "5 layers", 4)),
            pytest.param(
                PREDICTING,
                pp("zbv"),
                at("parallel.pp.schedule", "zbv", "head.weight"),
                marks=splitting,
            ),
            (EndlessModel(), pp(), at("parallel.pp", "Endless", "ends()")),
        ],
    )
    def test_models_that_cannot_be_cut_like_this(self, tmp_path, model, stage, expected):
        check_problems(problems_of(job(tmp_path, stage, model=model), 2), expected)

    def test_micro_batches_in_another_order(self):
        """Each stage and the loss count by themselves."""
        step = _Step([{"number": 0}, {"number": 1}], torch.tensor(1))
        assert [step.next_batch(who, torch.tensor(0))["number"] for who in (0, 1, "loss")] == [0, 0, 0]
        assert step.next_batch(0, torch.tensor(1)) == {"number": 1}
        with pytest.raises(ForgeError, match=naming("parallel.pp", "loss", "micro-batch 0", "place of 1")):
            step.next_batch("loss", torch.tensor(0))

    def test_a_carry_that_changes(self, tmp_path):
        def forward(rank):
            run = built(job(tmp_path, pp(layers=(2, 1)), model=WideningModel(layers=3)))
            batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
            shapes = ((torch.Size((1, 4, 16)), torch.float64),)
            section = run.built_stages[0]._pipeline.sections[rank]
            stage = _StageModule(run.model, section, lambda number: batch, shapes)
            with pytest.raises(ForgeError, match=naming("carry", "layer 1")):
                stage(number=torch.tensor(0))

        run_on_ranks(2, lambda rank: forward(rank) if rank == 0 else built(job(tmp_path, pp())) and None)

    def test_what_only_a_whole_model_can_do(self, tmp_path):
        def build(rank):
            whole = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=2))
            model = built(job(tmp_path, pp(), model=whole)).model
            with pytest.raises(ForgeError, match=naming("generate")):
                model.decode({}, {})
            with pytest.raises(ForgeError, match=naming("executor")):
                model({"input_ids": torch.zeros(1, 4, dtype=torch.long)})
            if rank == 1:
                with pytest.raises(ForgeError, match=naming("rank 1", "embedding")):
                    model.embed({"input_ids": torch.zeros(1, 4, dtype=torch.long)})

        run_on_ranks(2, build)


@frozen(kw_only=True)
class Referring(LossComponent):
    """The loss of tokens, beside a model that it loads."""

    path: str
    parallel: bool

    def build(self, context):
        other = load_model(self.path, device="cpu", parallel={"fsdp": {}} if self.parallel else False)

        def loss(head, hidden, batch):
            other.model(batch)
            return cross_entropy(head, hidden, batch)

        cross_entropy = CrossEntropy().build(context)
        return loss


def test_a_loss_whose_model_all_ranks_share_is_refused(tmp_path, make_job, train):
    path = str(train(make_job(steps=1)).folder)

    def build_with(parallel):
        try:
            built(job(tmp_path, pp(), loss=Referring(path=path, parallel=parallel)))
        except JobError as error:
            return [(problem.path, problem.message) for problem in error.problems]
        return []

    for whole, shared in run_on_ranks(2, lambda rank: (build_with(False), build_with(True))):
        assert whole == []
        [(path, message)] = shared
        assert (path, lacks(message, "ranks 0, 1")) == ("loss", [])
