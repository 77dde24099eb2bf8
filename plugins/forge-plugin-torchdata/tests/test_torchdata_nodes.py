"""The loader `nodes`: the samples of the core's loader, whatever reads them, and workers that end in order."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from attrs import define, frozen

from forge_core import JobError
from forge_core.checkpoint.state import Progress
from forge_core.config.rules import check_rules
from forge_core.contracts.components import DatasetComponent, TrainingHook
from forge_core.contracts.errors import DataError
from forge_core.data.loader import TrainLoader
from forge_core.data.reading import Plain
from forge_kit.data.document_streams import StreamedDocument, packed
from forge_plugin_torchdata import Nodes
from forge_testing import Numbers
from forge_testing.processes import endanger_forks, exit_code_of_fork
from forge_testing.refusals import at, check_problems, naming
from forge_testing.tiny import NumberSequences


class Counting:
    """Lane n has documents of n, n + lanes, n + 2 lanes, …, each of five tokens with the document's number."""

    held_out = None

    def __init__(self, lanes):
        self.lanes = lanes

    def read(self, lane, position):
        number = (position or {"next": 0})["next"]
        while True:
            yield StreamedDocument(np.full(5, lane + self.lanes * number), None, {"next": number})
            number += 1


@frozen(kw_only=True)
class CountingStream(DatasetComponent):
    lanes: int = 4

    def build(self, context):
        return packed(Counting(self.lanes), context)


MAPS = (Numbers(weight=2.0), Numbers(start=100, sequences=9))
STREAMS = (CountingStream(weight=2.0), Numbers(), CountingStream(lanes=2))


def load(job, build, count, samples=None):
    """Batches of some steps, and the position after them."""
    run = build(job)
    loader = TrainLoader(job, run.datasets, run.context, Progress(samples=samples or {}))
    try:
        return [loader.next_step() for _ in range(count)], loader.state()
    finally:
        loader.close()


def same(one, other):
    pairs = [(a, b) for step, of in zip(one, other, strict=True) for a, b in zip(step, of, strict=True)]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def test_workers_do_not_free_a_group_that_they_inherit(make_job, build):
    def load_in_danger():
        endanger_forks()
        load(make_job(data={"sources": MAPS, "workers": 2}), build, 3)

    assert exit_code_of_fork(load_in_danger, timeout=60) == 0


@pytest.mark.parametrize("sources", [MAPS, STREAMS], ids=["by number", "streams"])
@pytest.mark.parametrize("method", ["process", "thread"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_load_what_one_thread_loads(make_job, build, sources, method, workers):
    plain, position = load(make_job(micro_batch_size=2, data={"sources": sources}), build, 6)
    data = {"sources": sources, "workers": workers, "loader": Nodes(method=method)}
    by_workers, same_position = load(make_job(micro_batch_size=2, data=data), build, 6)
    assert same(by_workers, plain)
    assert same_position == position


@pytest.mark.parametrize("sources", [MAPS, STREAMS], ids=["by number", "streams"])
@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 3), (3, 1)])
def test_the_number_of_workers_may_change_when_a_run_is_continued(make_job, build, sources, before, after):
    whole, end = load(make_job(data={"sources": sources}), build, 7)
    first, position = load(make_job(data={"sources": sources, "workers": before}), build, 3)
    rest, same_end = load(make_job(data={"sources": sources, "workers": after}), build, 4, position)
    assert same(first + rest, whole)
    assert same_end == end


@frozen(kw_only=True)
class Special(Numbers):
    """Something happens to the process that reads sequence 5."""

    event: str = "kill"

    def build(self, context):
        event = self.event

        class Sequences(NumberSequences):
            def __getitem__(self, index):
                if index == 5 and event == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if index == 5 and event == "raise":
                    raise OSError("disk on fire")
                if event == "sleep":
                    time.sleep(0.05)
                if event == "collect":
                    gc.collect()
                return super().__getitem__(index)

            def where(self, index):
                return f"shard {index // 4}"

        return Sequences(8, 8, 1, 0)


def test_the_death_of_a_worker_names_its_end_and_what_it_was_reading(make_job, build):
    job = make_job(data={"sources": (Special(),), "workers": 2})
    with pytest.raises(DataError, match=naming("worker", "SIGKILL", "sequence 5 of source '0' (shard 1)")) as caught:
        load(job, build, 4)

    assert str(caught.value).count("sequence") == 2, "only the two rows of the unit that the dead worker had"


def test_the_death_of_a_worker_that_waits_is_named_too(make_job, build):
    run = build(job := make_job(data={"sources": (Numbers(),), "workers": 1}, steps=200))
    loader = TrainLoader(job, run.datasets, run.context)
    try:
        loader.next_step()
        time.sleep(0.5)  # until it has read ahead as far as it may
        for child in multiprocessing.active_children():
            child.kill()
        with pytest.raises(DataError, match=naming("worker", "SIGKILL")):
            list(iter(loader.next_step, None))
    finally:
        loader.close()


@pytest.mark.parametrize("method", ["process", "thread"])
def test_what_a_worker_raises_is_raised_in_its_turn(make_job, build, method):
    """With the place and the traceback, and after the units before it."""
    data = {"sources": (Special(event="raise"),), "workers": 2, "loader": Nodes(method=method)}
    whole, _ = load(make_job(data={"sources": (Numbers(sequences=8, ignored=1),)}), build, 2)
    fatal = next(n for n, step in enumerate(whole) if 5 in step[0]["input_ids"][:, 0])
    run = build(job := make_job(data=data))
    loader = TrainLoader(job, run.datasets, run.context)
    assert same([loader.next_step() for _ in range(fatal)], whole[:fatal])
    with pytest.raises(DataError, match=naming("sequence 5 of source '0' (shard 1)", "OSError: disk")) as caught:
        loader.next_step()
    loader.close()
    assert "in __getitem__" in "".join(caught.value.__notes__)


def test_closing_ends_every_process_and_thread(make_job, build):
    before = threading.active_count()
    load(make_job(data={"sources": STREAMS, "workers": 2}), build, 1)
    load(make_job(data={"sources": (Special(event="sleep"),), "workers": 2}), build, 1)
    assert multiprocessing.active_children() == []
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == before


def test_a_worker_does_not_free_the_garbage_that_it_inherits(make_job, build, tmp_path):
    """Some objects wait for their threads then, which a fork does not copy."""

    class Traced:
        def __init__(self):
            self.itself = self

        def __del__(self):
            (tmp_path / str(os.getpid())).touch()

    gc.disable()
    try:
        Traced()
        load(make_job(data={"sources": (Special(event="collect"),), "workers": 1}), build, 1)
    finally:
        gc.enable()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir() if path.name.isdigit()] == [str(os.getpid())]


def test_threads_that_start_later_have_the_threads_of_torch_that_they_had(make_job, build):
    """Those of torchdata set them to one, for all that start after them."""
    seen, before = [], torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        load(make_job(data={"sources": MAPS, "workers": 2, "loader": Nodes(method="thread")}), build, 2)
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [3]


def test_signals_to_the_process_group_leave_the_workers_alive(make_job, build):
    """The run shall save before it ends, and needs its data until then."""
    job = make_job(data={"sources": (Special(event="sleep"),), "workers": 2})
    run = build(job)
    loader = TrainLoader(job, run.datasets, run.context)
    loader.next_step()
    for child in multiprocessing.active_children():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(child.pid, number)
    assert len([loader.next_step() for _ in range(8)]) == 8
    loader.close()


ORPHANS = """
import multiprocessing, os, signal, sys
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_run
from forge_core.plugins.catalog import Catalog
from forge_testing import tiny_job
catalog = Catalog.installed()
job = tiny_job(sys.argv[1], catalog, data={"workers": 2})
run = build_run(job, build_context(job, catalog, None))
loader = TrainLoader(job, run.datasets, run.context)
loader.next_step()
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_do_not_outlive_a_run_that_is_killed(tmp_path):
    ended = subprocess.run([sys.executable, "-c", ORPHANS, str(tmp_path)], stdout=subprocess.PIPE, check=False)
    assert ended.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- the job file ------------------------------------------------------------------------------------------------


def test_workers_without_the_plugin_are_answered_with_the_line_that_installs_it(make_job, catalog_of):
    job = make_job(data={"workers": 2})
    check_problems(check_rules(job, catalog_of()), at("data.workers", "pip install forge-plugin-torchdata"))


@pytest.mark.parametrize(
    ("loader", "workers", "facts"),
    [(Plain(), 2, ["data.workers = 2", "data.workers = 0"]), (Nodes(), 0, ["data.workers = 0"])],
)
def test_a_loader_that_does_not_go_with_the_workers_is_refused(make_job, catalog, loader, workers, facts):
    problems = check_rules(make_job(data={"loader": loader, "workers": workers}), catalog)
    check_problems(problems, at("data.loader.type", *facts))


@define(kw_only=True, slots=False)
class Stop(TrainingHook):
    def on_step_end(self, context):
        if context.step == 3:
            context.request_stop("enough")


def test_another_loader_may_continue_a_run(make_job, train, lines):
    job = make_job(steps=6, job={"name": "whole"})
    whole = lines(train(job))
    train(make_job(steps=6, checkpoint={"interval": 3}, data={"workers": 2}), Stop())
    rest = lines(train(make_job(steps=6, data={"loader": Plain()})))
    assert [line["loss"] for line in rest] == [line["loss"] for line in whole]


def test_the_sources_must_last(make_job, build):
    job = make_job(data={"sources": (Numbers(sequences=8, max_epochs=1),), "workers": 2}, steps=3)
    with pytest.raises(JobError, match="max_epochs leaves 8"):
        load(job, build, 1)
