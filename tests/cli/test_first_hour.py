"""Mistakes of the first hour with Forge: each is answered in words, with the right exit code, and leaves nothing.

Each row of `MISTAKES` is a command line in a folder with one good job. `outcomes_of_lines.py` runs all in two
processes, one of which may not import torch: what is wrong with a job is said before that, so within a second or two.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import forked_starts
import pytest
from attrs import field, frozen

from forge_testing.processes import HANG_S

JOB = """
[job]
name = "b"
[train]
steps = 2
global_batch_size = 8
seq_len = 32
[model]
type = "transformer"
dim = 32
layers = 1
[model.attention]
heads = 2
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "text"
path = "text"
held_out_every = 4
[optimizer]
type = "adamw"
lr = 1e-3
"""


@frozen
class Mistake:
    """A command line, and how it must end."""

    number: int
    """In the walk of 75 mistakes that a sceptical engineer made; letters of the same mistake follow each other."""
    line: str
    """Arguments of `forge-run`, without quotes for a shell."""
    message: tuple[str, ...] | str
    """Texts that standard error must have."""
    files: Mapping[str, str | bytes] = field(factory=dict)
    """Files besides the job; a name that ends with a slash is a folder."""
    code: int = 2
    variables: Mapping[str, str] = field(factory=dict)
    torch: bool = False
    """Whether it takes more than reading the job to see the mistake."""
    before: str = ""
    """Statements that are run in the folder first; `forge("…")` is a command line, `stack` ends after the mistake."""
    begins: bool = False
    """Whether it shows only in a run that has begun, and so has its folder."""


def job(replace: str, by: str) -> Mapping[str, str]:
    assert replace in JOB
    return {"job.toml": JOB.replace(replace, by)}


HOOK = "--hooks.h.type=./hooks.py:"
RUN = "forge('job.toml')"
GREEDY = """
from forge_core import TrainingHook

class Greedy(TrainingHook):
    def on_gradients(self, context):
        import torch

        if context.step == 2:
            torch.empty(10**13)
"""
MISTAKES = [
    Mistake(
        1,
        "j.toml",
        ("j.toml:5: train.steps: expected int, got str '2'; write 2", "unknown key; did you mean 'layers'?"),
        {"j.toml": JOB.replace("steps = 2", 'steps = "2"').replace("layers", "layerz")},
    ),
    Mistake(2, "job.toml --optimizer.lr=-1", "--optimizer.lr=-1: optimizer.lr: must be > 0, got -1.0"),
    Mistake(3, "job.toml --train.steps=0", "train.steps: must be > 0, got 0"),
    Mistake(4, "job.toml --train.steps=9007199254740993", "train.steps: must be <= 9007199254740992, got 9007"),
    Mistake(4, "job.toml --train.global_batch_size=9007199254740993", "must be <= 9007199254740992, got 9007"),
    Mistake(4, "job.toml --job.seed=99999999999999999999", "job.seed: integers of TOML have 64 bits: at most 9223372"),
    Mistake(4, "generate run --seed 99999999999999999999", "--seed: must be at most 9223372036854775807"),
    Mistake(4, "evaluate run --tasks t --few-shot -1", "--few-shot: must be at least 0"),
    # LAYERS
    Mistake(5, "job.toml --train.micro_batch_size=3", "are not divisible by micro_batch_size 3"),
    Mistake(6, "job.toml --nproc 3", "8 is not divisible by the 3 data-parallel ranks"),
    Mistake(7, "empty.toml", ("required table is missing", "train", "model", "optimizer"), {"empty.toml": ""}),
    Mistake(8, "bin.toml", "bin.toml: not UTF-8 text: byte 0xd4 at offset 3", {"bin.toml": b"abc\xd4\xff"}),
    Mistake(9, "jop.toml", "jop.toml: no such file; did you mean 'job.toml'?"),
    Mistake(9, "nothing-like-it.toml", "nothing-like-it.toml: no such file"),
    Mistake(10, "text", "'text' is a folder"),
    Mistake(
        10, "old/run", "'old/run' is a folder; to continue a run: forge-run resume old/run", {"old/run/job.toml": JOB}
    ),
    Mistake(11, "syn.toml", "syn.toml:1:7: not valid TOML", {"syn.toml": "[train\n"}),
    Mistake(12, "job.toml --data.sources.0.path=nowhere", "'nowhere' does not exist (looked from "),
    Mistake(13, "job.toml --data.sources.0.path=emptyd", "'emptyd' has no data", {"emptyd/": ""}),
    Mistake(
        13,
        "job.toml --data.sources.0.path=other",
        "none of 1 files is of a known format (.txt",
        {"other/a.pdf": "x"},
    ),
    Mistake(
        14,
        "job.toml --data.sources.0.path=zero",
        "all 2 files are empty (0 bytes), the first is 'zero/a.txt'; give files with text",
        {"zero/a.txt": "", "zero/b.txt": ""},
    ),
    Mistake(
        15,
        "job.toml --data.sources.0.path=latin --data.sources.0.held_out_every=0",
        ("data.sources.0: ", "1.txt: byte 3 (0xe9) is not UTF-8", 'set errors = "replace"'),
        {"latin/1.txt": b"caf\xe9 " * 100},
        torch=True,
    ),
    Mistake(
        17,
        "job.toml --train.seq_len=4096",
        ("holds less than one sequence of train.seq_len = 4096 tokens", "add data, or shorten train.seq_len"),
        torch=True,
    ),
    Mistake(18, 'job.toml --data.tokenizer={type="bpe",vocab_size=200}', "must be > 256, got 200"),
    Mistake(
        19, "job.toml --model.vocab_size=100", "100 is less than the tokenizer's 257; give at least that", torch=True
    ),
    Mistake(
        20,
        "job.toml --data.sources.0.path=text/1.txt",
        "the corpus is a single document, which cannot be split; divide it into several files, or set held_out_every",
    ),
    Mistake(21, "trian job.toml", "'trian' is no command and no job file; did you mean 'run'?"),
    Mistake(21, "chekc job.toml", "'chekc' is no command and no job file; did you mean 'check'?"),
    Mistake(22, "job.toml --epochs=3", "--epochs=3: unknown option; in Forge it is no key: training lasts train.steps"),
    Mistake(22, "job.toml --resme=never", "--resme=never: unknown option; did you mean '--resume'?"),
    Mistake(22, "check job.toml --verbose", "--verbose: unknown option"),
    Mistake(23, "job.toml --resume auto --resume runs/zzz", "is neither a checkpoint nor a run", torch=True),
    Mistake(24, "job.toml --nproc 0", "--nproc: must be at least 1"),
    Mistake(25, "job.toml --nproc two", "--nproc: invalid positive value: 'two'"),
    Mistake(
        16,
        "job.toml --data.sources.0.path=log.jsonl",
        "the corpus is a single document, which cannot be split; divide it into several files, or set held_out_every",
        {"log.jsonl": '{"text": "' + "hello " * 200_000 + '"}'},
    ),
    Mistake(27, "job.toml", "the variable WORLD_SIZE is not set; it must be a whole number", variables={"RANK": "1"}),
    Mistake(27, "job.toml", "RANK is 'x'; it must be a whole number", variables={"RANK": "x", "WORLD_SIZE": "1"}),
    Mistake(27, "job.toml", "WORLD_SIZE is 2, but RANK is not set", variables={"WORLD_SIZE": "2"}),
    Mistake(
        30,
        "job.toml --train.device=cuda",
        (
            "SLURM has allotted 4 tasks, and this is the shell of the job, which is one process; `srun ",
            "train.device: ",
        ),
        variables={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
        torch=True,
    ),
    Mistake(31, "job.toml --train.device=cuda", 'train.device: is "cuda": what torch finds here is cpu', torch=True),
    Mistake(
        32,
        "job.toml --parallel.tp.size=2",
        ("parallel.tp.degree: required key is missing", "parallel.tp.size: unknown key"),
    ),
    Mistake(
        33,
        "check job.toml --parallel.tp.degree=4 --world-size 4",
        ("model.attention.kv_heads: 2 does not divide", "4"),
    ),
    Mistake(34, "check job.toml --parallel.pp.degree=3 --world-size 3", ("3 stages", "1 layer"), torch=True),
    Mistake(35, "check job.toml --parallel.fsdp={} --parallel.replicate={} --world-size 2", ("fsdp", "replicate")),
    Mistake(36, "job.toml --train.steps=1k", "expected int, got str '1k'"),
    Mistake(37, "job.toml --train.steps=4.0", "expected int, got float 4.0; write --train.steps=4"),
    Mistake(38, "job.toml --optimizer.lr=1e-3s", "expected float, got str '1e-3s'"),
    Mistake(39, "job.toml --train.deterministic=yes", "expected bool, got str 'yes'; write --train.deterministic=true"),
    Mistake(
        39, "job.toml --train.deterministic=Off", "expected bool, got str 'Off'; write --train.deterministic=false"
    ),
    Mistake(
        40,
        "job.toml --scheduler={type='wsd',warmup_steps=100}",
        ("warmup_steps", "100 is longer than the run", "train.steps is 2"),
    ),
    Mistake(41, "job.toml --model.attention.heads=5", "dim, which is 32"),
    Mistake(42, "job.toml --optimizer.lr=nan", "must be finite, got nan"),
    Mistake(43, "job.toml --job.name=../../etc/x", "job.name: must match "),
    Mistake(43, f"job.toml --job.name={'x' * 300}", "job.name: must match "),
    Mistake(44, "job.toml --job.output=afile", "job.output: 'afile' is a file", {"afile": ""}),
    Mistake(44, "job.toml --job.output=afile/runs", "job.output: 'afile' is a file", {"afile": ""}),
    Mistake(45, "dup.toml", "dup.toml:3:", {"dup.toml": "[train]\nsteps = 1\nsteps = 2\n"}),
    Mistake(
        46,
        "job.yaml",
        "job.yaml:1:6: looks like YAML, and jobs are TOML",
        {"job.yaml": "train:\n  steps: 4\n  seq_len: 3\n"},
    ),
    Mistake(47, "j.json", "j.json:1:1: looks like JSON, and jobs are TOML", {"j.json": '{"train": {"steps": 4}}'}),
    Mistake(48, "job.toml --train.precision=fp16", "expected one of 'bf16', 'fp32', 'fp64', got str 'fp16'"),
    Mistake(49, "job.toml --train.steps ten", "--train.steps=ten: train.steps: expected int, got str 'ten'"),
    Mistake(49, "--train.steps job.toml", "train.steps: there is no value; write --train.steps=VALUE"),
    Mistake(50, "job.toml -train.steps=10", "-train.steps=10: unknown option; did you mean '--train.steps=10'?"),
    Mistake(51, "job.toml train.steps=ten", "--train.steps=ten: train.steps: expected int, got str 'ten'"),
    Mistake(51, "train.steps=ten job.toml", "--train.steps=ten: train.steps: expected int, got str 'ten'"),
    Mistake(51, "job.toml +train.steps=3", "+train.steps=3: unknown option; did you mean '--train.steps=3'?"),
    Mistake(52, "job.toml --train.seq_len=10000000000", "holds less than one sequence of train.seq_len", torch=True),
    Mistake(53, "job.toml --model.attention.kv_heads=3", "heads, which is 2"),
    Mistake(54, "check job.toml --world-size 0", "--world-size: must be at least 1"),
    Mistake(
        55,
        "tables.toml",
        "expected array of dataset tables, got a table; write [[data.sources]]",
        {"tables.toml": JOB.replace("[[data.sources]]", "[data.sources]")},
    ),
    Mistake(56, f"job.toml {HOOK}H", "there is no file hooks.py"),
    Mistake(
        57,
        f"job.toml {HOOK}H",
        ("cannot load hook from './hooks.py:H'", "has no attribute 'H'"),
        {"hooks.py": "from forge_core import TrainingHook\nclass Hook(TrainingHook):\n    pass\n"},
    ),
    Mistake(58, f"job.toml {HOOK}H", "SyntaxError: ", {"hooks.py": "def x(:\n"}),
    Mistake(59, "check job.toml --loggers.nosuch={}", "no logger 'nosuch' is installed"),
    Mistake(60, "job.toml --job.output=/proc/nowhere", "job.output: /proc/nowhere/b cannot be written: ", torch=True),
    Mistake(
        61,
        "job.toml --train.steps=2",
        "checkpoint: not one fits: weights of 0 MB each, besides optimizer state; 0.0 GB free in runs/b",
        before="import shutil; stack.enter_context(mock.patch('shutil.disk_usage', return_value=mock.Mock(free=1000)))",
        torch=True,
    ),
    Mistake(62, "job.toml", "cannot write the cache: ", variables={"FORGE_CACHE": "/proc/nope"}, code=1, torch=True),
    Mistake(
        63,
        "job.toml --train.steps=4",
        (
            "passing over a damaged checkpoint: ",
            "its SHA-256 is not the manifest's",
            "no checkpoint is intact: ",
        ),
        before=f"{RUN}; flip(next(Path('runs/b/checkpoints/step-2').glob('*.distcp')))",
        code=1,
        torch=True,
    ),
    Mistake(
        64,
        "job.toml",
        ("runs/b is in use by process ", "; give this run another job.name"),
        before="stack.enter_context(owned(Path('runs/b')))",
        code=1,
        torch=True,
    ),
    Mistake(
        65,
        "checkpoints runs/b prune",
        ("runs/b is in use by process ", "stop that run first, or wait until it ends"),
        before=f"{RUN}; stack.enter_context(owned(Path('runs/b')))",
        code=1,
        torch=True,
    ),
    Mistake(
        66,
        "job.toml --train.steps=4 --model.dim=64",
        (
            "the job is not the one that saved runs/b/checkpoints/step-2:",
            "impossible:\n    model.dim: 32 -> 64",
            "Undo what is impossible. To start a new run from these weights instead",
            "[checkpoint.load]",
        ),
        before=RUN,
        torch=True,
    ),
    Mistake(
        66,
        "job.toml --train.steps=4 --optimizer.lr=0.5",
        ("need --resume-with-changes:\n    optimizer.lr: 0.001 -> 0.5", "Or undo the changes, or take another name"),
        before=RUN,
        torch=True,
    ),
    Mistake(
        67,
        "job.toml --resume never",
        ("this run folder has checkpoints already (steps [2])", "continue it with --resume auto"),
        before=RUN,
        torch=True,
    ),
    Mistake(68, "job.toml --resume runs/zzz", "runs/zzz is neither a checkpoint nor a run folder", torch=True),
    Mistake(70, "generate runs/b --temperature -1", "--temperature: must be at least 0, got -1"),
    Mistake(70, "generate runs/b --top-p 7", "--top-p: must be above 0 and at most 1, got 7"),
    Mistake(71, "generate runs/zzz", "runs/zzz", torch=True),
    Mistake(72, "compare job.toml --set optimizer.lrr=1,2 --out c", "did you mean 'lr'?"),
    Mistake(72, "compare job.toml --set optimizer.lr --out c", "not as key=value"),
    Mistake(73, "data prepare --out o --tokenizer bytes", "the following arguments are required: INPUT"),
    Mistake(73, "data prepare text --out o --tokenizer bpee", "did you mean 'bpe'?"),
    Mistake(
        74,
        "job.toml --model.dim=2000000",
        ("model: ", " parameters on this rank take ", "GB free; see `forge-run plan`"),
        torch=True,
    ),
    Mistake(74, "job.toml --model.dim=2000000000000", "model.dim: must be <= 16777216, got 2000000000000"),
    Mistake(74, 'job.toml --data.tokenizer={type="bpe",vocab_size=2000000000}', "must be <= 1048576, got 2000000000"),
    Mistake(74, "job.toml --data.workers=100000", "data.workers: must be <= 1024, got 100000"),
    Mistake(
        74,
        "job.toml --model.vocab_size=9000000000000000000",
        "forge-run: memory ran out: Storage size calculation overflowed",
        code=1,
        torch=True,
    ),
    Mistake(74, "job.toml --model.layers=2000000000", "model.layers: must be <= 10000, got 2000000000"),
    Mistake(
        74,
        f"job.toml {HOOK}Greedy",
        (
            "forge-run: memory ran out in step 2, hook hooks.h, on_gradients: ",
            "40,000,000,000,000 bytes",
            "Reduce train.micro_batch_size (here 8), train.seq_len or the model, or recompute activations; ",
            "see `forge-run plan`",
        ),
        {"hooks.py": GREEDY},
        code=1,
        torch=True,
        begins=True,
    ),
    Mistake(75, "new-plugin optimzer mine", "did you mean 'optimizer'?"),
    Mistake(
        75,
        "new-plugin optimizer mine",
        "nothing is overwritten; choose another --dir",
        {"forge-plugin-mine/README.md": ""},
    ),
    Mistake(0, "completion", "name the shell: bash, zsh, fish"),
    Mistake(0, "explain adamww", "did you mean 'optimizer.adamw'?"),
    Mistake(0, "explain nothing_of_the_kind", "nothing is called 'nothing_of_the_kind'"),
]


def prepare(folder: Path, mistake: Mistake) -> None:
    files = {"job.toml": JOB} | {f"text/{number}.txt": f"file {number} says " + "hello " * 30 for number in range(8)}
    for name, content in (files | dict(mistake.files)).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The end of each command line, in the order of the table."""
    root = tmp_path_factory.mktemp("mistakes")
    results: dict[int, dict] = {}
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"FORGE_CACHE": str(root / "cache"), "OMP_NUM_THREADS": "1"}
    for torch in (False, True):
        chosen = [number for number, mistake in enumerate(MISTAKES) if mistake.torch == torch]
        for number in chosen:
            prepare(root / str(number), MISTAKES[number])
        rows = [
            {
                "folder": str(root / str(number)),
                "arguments": MISTAKES[number].line.split(),
                "variables": dict(MISTAKES[number].variables),
                "cache": str(root / "cache"),
                "limit_s": 60,
                "before": MISTAKES[number].before,
            }
            for number in chosen
        ]
        done = subprocess.run(
            [sys.executable, "-m", "outcomes_of_lines"],
            input=json.dumps(rows),
            cwd=Path(__file__).parent,
            # A fork has torch from the start, and so cannot show whether it is imported
            env=environment if torch else environment | {forked_starts.REAL: "1"},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results |= dict(zip(chosen, json.loads(done.stdout.splitlines()[-1]), strict=True))
    return [results[number] for number in range(len(MISTAKES))]


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[f"{m.number}: {m.line}" for m in MISTAKES])
def test_a_mistake_is_named_and_leaves_nothing(outcomes: list[dict], number: int) -> None:
    mistake, outcome = MISTAKES[number], outcomes[number]
    texts = [mistake.message] if isinstance(mistake.message, str) else mistake.message
    assert "Traceback" not in outcome["err"], outcome["err"]
    assert [text for text in texts if text not in outcome["err"]] == [], outcome["err"]
    assert outcome["code"] == mistake.code
    assert mistake.begins or outcome["created"] == []
    assert mistake.torch or not outcome["torch"], "torch was imported"


def forge_run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """What a process alone shows: variables that libraries read once, and ranks, which end their process."""
    prepare(folder, Mistake(0, "", ""))
    environment = {**os.environ, "FORGE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "forge_core", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )


def test_threads_that_are_no_number_and_a_world_of_one_disturb_no_ranks(tmp_path: Path) -> None:
    """Mistakes 26 and 29: torch's own library names the variable, and the ranks of `--nproc` are those asked for."""
    variables = {"OMP_NUM_THREADS": "abc", "RANK": "0", "WORLD_SIZE": "1"}
    done = forge_run(tmp_path, "job.toml", "--nproc", "2", "--train.steps=1", **variables)
    assert done.returncode == 0, done.stderr
    assert "replicate 2, fp32" in done.stdout
    assert "finished at step 1" in done.stdout


def test_a_port_that_is_taken_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    """Mistake 69, with two ranks, which need one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = forge_run(tmp_path, "job.toml", **variables)
    assert done.returncode == 1
    hint = "set MASTER_PORT to a free port, the same for all ranks"
    assert f"forge-run: rank 0: cannot serve the ranks' store at port {port}; {hint}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
