"""Non-finite steps, signals, dry run, waits, evaluation mode, schedules, devices."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attrs import define, frozen
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.checkpoint.storage import Local
from forge_core.cli import main
from forge_core.contracts.components import OptimizerComponent, SchedulerComponent, TrainingHook
from forge_core.contracts.errors import ExitCode, ForgeError, NonFiniteError
from forge_core.contracts.phase import Phase
from forge_core.contracts.run_end import Cause
from forge_core.engine.evaluation import evaluation_mode
from forge_testing import Numbers, TinyAdamW, TinyModel
from forge_testing.refusals import lacks, naming, refuses


@define(kw_only=True, slots=False)
class Poison(TrainingHook):
    """Makes one gradient infinite at some steps."""

    at: tuple[int, ...]

    def on_gradients(self, context):
        self.weight = context.model.head.weight
        self.before = self.weight.detach().clone()

    def on_step_begin(self, context):
        if context.step in self.at:
            context.batches[0]["labels"][0, 0] = 1
            self.handle = context.model.head.weight.register_hook(lambda gradient: gradient * torch.inf)

    def on_step_end(self, context):
        if context.step in self.at:
            self.handle.remove()
            self.unchanged = torch.equal(self.weight, self.before)


def test_a_step_that_is_not_finite_is_skipped_counted_and_logged(make_job, train, lines):
    poison = Poison(at=(2,))
    records = lines(train(make_job(), poison))
    assert poison.unchanged
    assert [record.get("skipped", 0) for record in records] == [0, 1, 0, 0]
    assert records[1]["grad_norm"] in ("inf", "nan")
    assert records[2]["grad_norm"] < 10
    assert [record["tokens"] for record in records] == [32, 64, 96, 128]


def test_a_skipped_update_advances_step_and_schedule_but_not_the_optimizer(make_job, train):
    @define(kw_only=True, slots=False)
    class Watch(TrainingHook):
        def on_train_end(self, context):
            self.steps = {int(state["step"]) for state in context.optimizer.state.values()}

    watch = Watch()
    summary = train(make_job(), Poison(at=(2,)), watch)
    assert (summary.step, watch.steps) == (4, {3})


def test_too_many_skipped_updates_in_a_row_stop_the_run_with_everything_saved(make_job, train, tmp_path):
    with pytest.raises(NonFiniteError, match=naming("3 steps", "step 4")) as caught:
        train(make_job(steps=9, non_finite_limit=3), Poison(at=(2, 3, 4, 5)))
    assert caught.value.exit_code == ExitCode.NON_FINITE
    assert (tmp_path / "run/checkpoints/step-4/manifest.json").is_file()


def test_policy_stop_lets_a_hook_skip_finite_updates(make_job, train):
    @define(kw_only=True, slots=False)
    class SkipSecond(TrainingHook):
        may_skip = True

        def on_gradients(self, context):
            if context.step == 2:
                context.skip_update("as the test says")

    assert train(make_job(non_finite="stop"), SkipSecond()).step == 4


def test_policy_stop_ends_at_the_first(make_job, train, tmp_path):
    with pytest.raises(NonFiniteError, match=naming("1 step", "step 2")):
        train(make_job(non_finite="stop"), Poison(at=(2,)))
    assert (tmp_path / "run/checkpoints/step-2").is_dir()


def test_a_run_whose_last_update_was_skipped_is_no_success_however_often_it_is_started(make_job, train):
    with pytest.raises(NonFiniteError, match=naming("gradients", "step 4")) as caught:
        train(make_job(), Poison(at=(4,)))
    assert caught.value.exit_code == ExitCode.NON_FINITE
    with pytest.raises(NonFiniteError, match="step 4"):
        train(make_job())
    assert train(make_job(steps=5)).exit_code == ExitCode.FINISHED, "a longer run has another end"


@pytest.mark.parametrize("final", [False, True])
def test_a_run_whose_last_evaluation_is_not_finite_is_no_success(make_job, train, final):
    @define(kw_only=True, slots=False)
    class Spoil(TrainingHook):
        def on_step_end(self, context):
            if context.step == 4:
                context.model.head.weight.data.fill_(torch.nan)

        def on_eval_end(self, context, metrics):
            if final:
                context.request_stop("early", final=True)

    job = make_job(steps=9 if final else 4, eval={"interval": 4})
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="eval/loss"):
            train(job, Spoil())


def test_a_stop_by_request_between_skipped_updates_is_left_to_the_policy(make_job, train):
    @define(kw_only=True, slots=False)
    class Stop(TrainingHook):
        def on_step_end(self, context):
            if context.step == 2:
                context.request_stop("as the test says")

    assert train(make_job(), Poison(at=(2,)), Stop()).exit_code == ExitCode.STOPPED


def test_policy_ignore_updates_all_the_same(make_job, train):
    poison = Poison(at=(2,))
    with pytest.raises(NonFiniteError, match="eval/loss"):
        train(make_job(non_finite="ignore", steps=2), poison)
    assert not poison.unchanged


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_finishes_the_step_saves_and_stops(make_job, train, number):
    @define(kw_only=True, slots=False)
    class Send(TrainingHook):
        def on_gradients(self, context):
            if context.step == 2:
                os.kill(os.getpid(), number)

    assert main(["run", "no-such-job.toml"]) == ExitCode.BAD_JOB, "a command that failed here before leaves nothing"
    summary = train(make_job(), Send())
    assert summary.stopped == f"signal {number.name}"
    assert summary.exit_code == ExitCode.STOPPED
    assert (summary.folder / "checkpoints/step-2").is_dir()
    assert train(make_job()).step == 4, "the same command continues"


def test_stop_after_ends_a_run_whose_schedule_and_later_steps_are_those_of_the_whole(make_job, train, lines):
    options = {"scheduler": Ramp(), "eval": {"interval": 3}}
    whole = train(make_job(steps=6, job={"name": "whole"}, **options))
    short = train(make_job(steps=6, stop_after=4, **options))
    assert (short.step, short.exit_code, short.end.cause) == (4, ExitCode.FINISHED, Cause.PLANNED)
    assert (short.folder / "checkpoints/step-4").is_dir()
    again = train(make_job(steps=6, stop_after=4, **options))
    assert (again.step, again.loss, again.end.cause) == (4, None, Cause.PLANNED)
    rest = train(make_job(steps=6, **options))
    curves = [[(line["loss"], line["lr"]) for line in lines(summary)] for summary in (whole, rest)]
    assert curves[0] == curves[1]
    assert (rest.exit_code, rest.end.cause, rest.evaluation) == (ExitCode.FINISHED, Cause.FINISHED, whole.evaluation)


def test_the_dry_run_leaves_no_trace(make_job, train, lines, tmp_path):
    model = TinyModel(dropout=0.2)
    curves = []
    for mode in ("never", "always"):
        job = make_job(model=model, dry_run=mode, job={"name": mode})
        curves.append([(r["loss"], r["grad_norm"]) for r in lines(train(job))])
    assert curves[0] == curves[1]


def test_the_dry_run_reports_the_peak_of_memory(make_job, catalog):
    from forge_core.engine.trainer import Trainer

    told = []
    Trainer(make_job(dry_run="always"), catalog=catalog, echo=told.append).run()
    (line,) = (text for text in told if text.startswith("dry run: "))
    assert not lacks(line, "4 x 8", "peak memory")
    assert 0.1 < float(line.split()[-2]) < 10


def test_the_dry_run_finds_errors_before_the_first_step(make_job, train):
    @define(kw_only=True, slots=False)
    class Never(TrainingHook):
        def on_step_begin(self, context):
            pytest.fail("training started")

    with pytest.raises(IndexError) as caught:
        train(make_job(dry_run="always", data={"sources": (Broken(),)}), Never())
    [note] = caught.value.__notes__
    assert not lacks(note, "dry run", "4 x 8")


CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 79.10 GiB in all.")


@pytest.mark.parametrize(
    ("allocate", "words"),
    [
        (lambda: torch.empty(10**13), r"DefaultCPUAllocator: .* 40,000,000,000,000 bytes"),
        (lambda: np.zeros(10**14), r"\b728\. TiB\b"),
        (lambda: (_ for _ in ()).throw(MemoryError), r"\bPython\b"),
        (lambda: (_ for _ in ()).throw(CUDA), r"\b20\.00 GiB\. GPU 0\b"),
    ],
    ids=["torch", "numpy", "python", "cuda"],
)
@pytest.mark.parametrize("dry_run", ["never", "always"])
def test_memory_that_runs_out_is_an_error_in_words_with_the_keys_that_reduce_it(
    make_job, train, allocate, words, dry_run
):
    @define
    class Greedy(TinyModel):
        def build(self, context):
            model = super().build(context)
            model.register_forward_pre_hook(lambda *_: allocate())
            return model

    where = Phase.DRY_RUN if dry_run == "always" else f"step 1, {Phase.FORWARD_BACKWARD}"
    with pytest.raises(ForgeError, match=rf"\b{where}: .*{words}") as caught:
        train(make_job(model=Greedy(), dry_run=dry_run))
    advice = str(caught.value).splitlines()[1]
    assert not lacks(advice, "train.micro_batch_size", 4, "train.seq_len")
    assert isinstance(caught.value.__context__, MemoryError | RuntimeError), "the cause is kept for Python"


class TestRoomForCheckpoints:
    """Known before training, so that no step is trained in vain."""

    @pytest.fixture
    def weights(self, build, make_job):
        return 4 * sum(build(make_job()).outline.sizes.values())

    @pytest.fixture
    def disk(self, monkeypatch):
        def set_free(free):
            usage = SimpleNamespace(total=10**12, used=0, free=free)
            monkeypatch.setattr("forge_core.engine.reporting.shutil.disk_usage", lambda path: usage)

        return set_free

    def test_a_job_whose_weights_do_not_fit_is_refused_and_leaves_nothing(
        self, make_job, train, disk, weights, tmp_path
    ):
        disk(weights - 1)
        with refuses("checkpoint", "0 MB", tmp_path / "run"):
            train(make_job())
        assert not (tmp_path / "run").exists()

    def test_less_than_is_kept_with_two_moments_each_is_a_warning(self, make_job, train, disk, weights):
        disk(3 * weights * 4 - 1)  # three are kept while the next is written
        with pytest.warns(UserWarning, match=naming("checkpoints", "checkpoint.keep")):
            assert train(make_job()).step == 4

    def test_enough_is_neither(self, make_job, train, disk, weights, recwarn):
        disk(3 * weights * 4)
        assert train(make_job()).step == 4
        assert not [warning for warning in recwarn if "checkpoints" in str(warning.message)]

    def test_the_disk_is_that_of_the_storage(self, make_job, train, monkeypatch, tmp_path):
        asked = []

        def usage(path):
            asked.append(path)
            return SimpleNamespace(free=10**12)

        monkeypatch.setattr("forge_core.engine.reporting.shutil.disk_usage", usage)
        (tmp_path / "scratch").mkdir()
        train(make_job(checkpoint={"storage": Local(folder=str(tmp_path / "scratch/checkpoints"))}))
        assert asked == [tmp_path / "scratch"]


@frozen(kw_only=True)
class Broken(Numbers):
    """Token ids beyond the model's vocabulary."""

    def build(self, context):
        class Beyond:
            held_out, bytes_per_token = None, None

            def __len__(self):
                return 8

            def __getitem__(self, index):
                import numpy as np

                return {"input_ids": np.full(8, 1000), "labels": np.zeros(8, np.int64)}

        return Beyond()


class Waits(TorchDispatchMode):
    """Counts operations that hand a device's value to the host."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@define(kw_only=True, slots=False)
class CountWaits(TrainingHook):
    """Counts waits from the second step's begin to its end, across the update."""

    def on_step_begin(self, context):
        if context.step == 2:
            self.mode = Waits()
            self.mode.__enter__()

    def on_step_end(self, context):
        if context.step == 2:
            self.mode.__exit__(None, None, None)


@pytest.mark.parametrize(("policy", "waits"), [("ignore", 0), ("skip", 1), ("stop", 1)])
def test_a_step_waits_for_the_device_only_where_declared(make_job, train, policy, waits):
    counter = CountWaits()
    train(make_job(non_finite=policy, optimizer=FusedAdamW()), counter)
    assert sum(counter.mode.counts.values()) == waits, counter.mode.counts


@frozen(kw_only=True)
class FusedAdamW(TinyAdamW):
    def build(self, context, parameters):
        return torch.optim.AdamW(parameters.groups(0.1), lr=self.lr, fused=True)


class Switching(torch.optim.SGD):
    """Keeps other weights for evaluation, as schedule-free optimizers do."""

    mode = "train"

    def eval(self):
        self.mode = "eval"

    def train(self):
        self.mode = "train"

    def evaluation_weights(self):
        return {}

    def load_evaluation_weights(self, weights):
        pass

    def step(self, closure=None):
        assert self.mode == "train"
        return super().step(closure)


@frozen(kw_only=True)
class SwitchingComponent(OptimizerComponent):
    def build(self, context, parameters):
        return Switching(parameters.groups(0.0), lr=0.1)


def test_optimizer_and_model_are_in_evaluation_mode_during_evaluation_only(make_job, train, monkeypatch):
    from forge_core.engine.evaluation import HeldOut

    seen = []

    class Watched(HeldOut):
        def evaluate(self, context):
            seen.append((context.model.training, torch.is_grad_enabled()))
            return {}

    @define(kw_only=True, slots=False)
    class Watch(TrainingHook):
        def on_eval_end(self, context, metrics):
            seen.append((context.optimizer.mode, context.model.training))

    job = make_job(steps=1, optimizer=SwitchingComponent(), evaluations={"held_out": Watched()})
    train(job, Watch())
    assert seen == [(False, False), ("train", True)]


def test_modules_get_their_own_mode_back():
    model = nn.Sequential(nn.Dropout().eval(), nn.Dropout())  # the first is frozen, say
    with evaluation_mode(model, torch.optim.SGD([torch.zeros(1)])):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]


def test_the_first_update_has_a_rate_and_warmup_reaches_the_base(make_job, train, lines):
    from forge_core.schedules import Constant

    records = lines(train(make_job(scheduler=Constant(warmup_steps=2))))
    assert [record["lr"] for record in records] == pytest.approx([0.005, 0.01, 0.01, 0.01])


@frozen(kw_only=True)
class Ramp(SchedulerComponent):
    def build(self, context):
        return lambda step, total: 0.5 + 0.1 * step / total


@frozen(kw_only=True)
class Momentum(OptimizerComponent):
    lr: float = 0.1
    momentum: float | SchedulerComponent = 0.9

    def build(self, context, parameters):
        return torch.optim.SGD(parameters.groups(0.0), lr=self.lr, momentum=0.9)


def test_any_scalar_of_an_optimizer_may_follow_a_schedule(make_job, train):
    @define(kw_only=True, slots=False)
    class Watch(TrainingHook):
        def on_train_begin(self, context):
            self.seen = []

        def on_step_end(self, context):
            self.seen.append(context.optimizer.param_groups[0]["momentum"])

    watch = Watch()
    train(make_job(optimizer=Momentum(momentum=Ramp())), watch)
    assert watch.seen == pytest.approx([0.5, 0.525, 0.55, 0.575])


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
def test_evaluation_is_the_mean_over_all_held_out_tokens(make_job, train, build, micro_batch_size):
    data = {"sources": (Numbers(held_out=7),)}
    job = make_job(global_batch_size=12, micro_batch_size=micro_batch_size, data=data, precision="fp64", steps=1)
    summary = train(job)
    assert summary.evaluation["eval/tokens"] == 7 * 8
    expected = train(make_job(global_batch_size=12, data=data, precision="fp64", steps=1, job={"name": "whole"}))
    assert summary.evaluation["eval/loss"] == pytest.approx(expected.evaluation["eval/loss"], rel=1e-12)
    assert summary.evaluation["eval/bits_per_byte"] == pytest.approx(
        summary.evaluation["eval/loss"] / 0.6931471805599453 / 2
    )


def test_evaluation_does_not_change_training(make_job, train, lines):
    model = TinyModel(dropout=0.2)
    often = train(make_job(model=model, eval={"interval": 1}, job={"name": "often"}))
    never = train(make_job(model=model, job={"name": "never"}))
    assert [r["loss"] for r in lines(often)] == [r["loss"] for r in lines(never)]


def test_cuda_is_refused_by_name_where_there_is_none(make_job, train, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses("train.device", '"cuda"', "torch"):
        train(make_job(device="cuda"))
    assert list(tmp_path.iterdir()) == []


def test_the_collector_is_off_during_training_and_on_afterwards(make_job, train):
    @define(kw_only=True, slots=False)
    class Watch(TrainingHook):
        def on_step_end(self, context):
            self.enabled = gc.isenabled()

    watch = Watch()
    train(make_job(), watch)
    assert not watch.enabled
    assert gc.isenabled()


def test_a_run_folder_has_one_owner(make_job, train):
    @define(kw_only=True, slots=False)
    class Second(TrainingHook):
        def on_step_end(self, context):
            with pytest.raises(ForgeError, match=naming(f"process {os.getpid()}", "run")):
                train(make_job())
            self.tried = True

    hook = Second()
    train(make_job(), hook)
    assert hook.tried


def test_deterministic_algorithms_are_a_key(make_job, train):
    @define(kw_only=True, slots=False)
    class Watch(TrainingHook):
        def on_step_end(self, context):
            self.deterministic = torch.are_deterministic_algorithms_enabled()

    watch = Watch()
    train(make_job(deterministic=True), watch)
    assert watch.deterministic
    train(make_job(job={"name": "again"}), watch)
    assert not watch.deterministic
