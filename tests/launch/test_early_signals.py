"""A signal before the first step ends a run at once, wherever it is: in one line, with exit code 75."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time

import pytest

from forge_core.checkpoint.run_folder import RunFolder
from forge_core.contracts.run_end import Cause
from forge_testing.refusals import lacks

from .conftest import wait_until

pytestmark = pytest.mark.slow

MOMENTS = '''
import ctypes
import os
from pathlib import Path

from attrs import define, frozen
from forge_core import Plugin, hookimpl
from forge_plugin_text.bpe import BPE


def reach(moment):
    """Stay in native code, where Python runs no handlers of signals."""
    if os.environ["MOMENT"] == moment and ("RANK" in os.environ or os.environ["RANKS"] == "1"):
        Path(f"reached-{os.environ.get('RANK', 0)}").touch()
        while True:
            ctypes.CDLL(None).usleep(500_000)


reach("import")


@define(kw_only=True, slots=False)
class Moments(Plugin):
    @hookimpl(wrapper=True)
    def forge_build_dataset(self, context):
        reach("data")
        return (yield)

    @hookimpl(wrapper=True)
    def forge_build_model(self, context):
        reach("model")
        return (yield)


@frozen(kw_only=True)
class MarkedBpe(BPE):
    """Says when all text has been read; what follows is the search for merges, in Rust."""

    def build(self, context, documents):
        readings = []

        def marked():
            yield from documents()
            readings.append(1)
            if len(readings) == 2:  # the first is for the digest by which a trained tokenizer is found in the cache
                Path(f"reached-{os.environ.get('RANK', 0)}").touch()

        return super().build(context, marked)
'''


@pytest.fixture
def moments(job):
    (job.folder / "moments.py").write_text(MOMENTS)
    return job


def interrupted(job, moment: str, *arguments: str, ranks: int = 1) -> tuple[int, str, str]:
    options = ["--plugins.moments.type=./moments.py:Moments", *arguments]
    process = job.start(*options, *(["--nproc", str(ranks)] if ranks > 1 else []), MOMENT=moment, RANKS=str(ranks))
    there = [job.folder / f"reached-{rank}" for rank in range(ranks)]
    assert wait_until(lambda: all(path.exists() for path in there) or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    return job.finish(process)


LINE = "forge-run: stopped by SIGINT before training began; there is nothing new to save\n"


@pytest.mark.parametrize("moment", ["import", "data", "model"])
def test_a_process_alone_ends_in_one_line(moments, moment):
    code, _, err = interrupted(moments, moment)
    assert (code, err) == (75, LINE)
    if moment == "data":  # the run has its folder by then
        end = RunFolder(moments.run).end()
        assert (end.code, end.cause, end.signal, end.step) == (75, Cause.SIGNAL, "SIGINT", None)


@pytest.mark.parametrize("moment", ["import", "model"])
def test_several_ranks_end_in_one_line(moments, moment):
    code, _, err = interrupted(moments, moment, ranks=2)
    assert (code, err) == (75, LINE)


def test_training_a_tokenizer_in_rust_is_no_refuge(moments):
    words = random.Random(0)
    text = " ".join("".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=9)) for _ in range(300_000))
    (moments.folder / "corpus.txt").write_text(text)
    source = '--data.sources=[{type = "text", path = "corpus.txt", held_out_every = 0}]'
    tokenizer = '--data.tokenizer={type = "./moments.py:MarkedBpe", vocab_size = 30000}'
    code, _, err = interrupted(moments, "bpe", source, tokenizer)
    assert (code, err) == (75, LINE)


@pytest.mark.parametrize("command", [["check", "job.toml"], ["job.toml"]])
def test_before_the_command_is_known_too(job, command, tmp_path):
    # A catalog that takes for ever: metadata is read before anything else
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata, pathlib, time\n"
        "def distributions(**kwargs):\n"
        "    pathlib.Path('reached-0').touch()\n"
        "    time.sleep(600)\n"
        "importlib.metadata.distributions = distributions\n"
    )
    arguments = [sys.executable, "-m", "forge_core", *command]
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(arguments, cwd=tmp_path, env=environment, stderr=pipe, text=True)
    assert wait_until((tmp_path / "reached-0").exists)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 75
    [line] = err.splitlines()
    assert line.startswith("forge-run: ")
    assert not lacks(line, "SIGINT")


FORK = """
import multiprocessing, os, signal, time
from forge_core.launch.stop_requests import StopRequests

received = []
requests = StopRequests(received.append)
context = multiprocessing.get_context("fork")
child = context.Process(target=time.sleep, args=(600,))
child.start()
time.sleep(0.5)
os.kill(child.pid, signal.SIGINT)
time.sleep(0.5)
assert child.is_alive(), "the parent decides what its children do on Ctrl-C"
child.terminate()
child.join()
time.sleep(0.5)
print(received, child.exitcode)
"""


def test_a_signal_to_a_forked_child_is_none_to_its_parent():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[] -15\n", "")


MANY_FILES = """
import os, signal, time
from forge_core.launch.stop_requests import StopRequests

for _ in range(1100):
    os.open(os.devnull, os.O_RDONLY)
received = []
requests = StopRequests(received.append)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
requests.close()
print(received.count(signal.SIGTERM))
"""


def test_requests_reach_a_process_with_more_than_a_thousand_open_files():
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert most > 1200, "this machine allows no process as many open files"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, 1200), most))
    try:
        done = subprocess.run([sys.executable, "-c", MANY_FILES], capture_output=True, text=True, check=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    # Once by the handler in the main thread, once by the thread that also counts it
    assert (done.stdout, done.stderr) == ("2\n", "")


KEYBOARD = """
import sys
from pathlib import Path
from forge_core import cli
from forge_core.plugins.catalog import CORE, Catalog, Distribution, Offer

def command(argv):
    Path(argv[0]).touch()
    while True:
        pass

catalog = Catalog([Offer("command", "spin", "here:command", Distribution(CORE, "0"), command)])
Catalog.installed = classmethod(lambda cls: catalog)
sys.argv[1:] = ["spin", sys.argv[1]]
sys.exit(cli.main())
"""


def test_other_commands_are_interrupted_without_a_traceback(tmp_path):
    arguments = [sys.executable, "-c", KEYBOARD, str(tmp_path / "begun")]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    assert wait_until((tmp_path / "begun").exists)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (130, "forge-run: interrupted\n")
