"""`forge-run plan`, as a user meets it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from forge_core import load_job
from forge_core.cli import main
from forge_core.parallel.mesh import leave_group
from forge_plugin_plan.gpus import find_gpu
from forge_plugin_plan.kernels import FORMULAS, FusedAttention
from forge_plugin_plan.meter import Meter
from forge_plugin_plan.report import SPARE
from forge_testing.refusals import lacks

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
JOB = """
[train]
steps = 1
global_batch_size = 64
micro_batch_size = 2
seq_len = 256
precision = "bf16"
[model]
type = "transformer"
dim = 64
layers = 4
vocab_size = 512
[model.attention]
heads = 4
[optimizer]
type = "adamw"
[[data.sources]]
type = "memmap"
path = "nowhere"
"""


def plan(folder: Path, *arguments: str, command: str = "plan") -> int:
    leave_group()
    (folder / "job.toml").write_text(JOB)
    return main([command, str(folder / "job.toml"), *arguments])


def test_json_has_the_figures_that_the_text_rounds(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    where = ("--world-size=8", "--parallel.fsdp.shard=2", "--parallel.pp.degree=2", "--parallel.tp.degree=2")
    assert plan(tmp_path, *where, "--gpu=h100", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["world_size"], facts["layout"], facts["gpu"]) == (8, "pp 2, shard 2, tp 2", "H100 SXM")
    assert facts["tokens"] == 64 * 256
    assert [rank["pipeline_rank"] for rank in facts["ranks"]] == [0, 1]
    for rank in facts["ranks"]:
        assert rank["peak"] == sum(rank["at_peak"].values())
        assert all(rank["most"][purpose] >= size for purpose, size in rank["at_peak"].items())
        assert rank["flops"] > 0
        assert {"compute", "memory", "launches"} <= rank["seconds_at_least"].keys()
        assert all(0 < wait < rank["seconds_at_least"][line] for line, wait in rank["latency"].items())
        assert any(sent["along"].startswith("pp (2 ranks") and sent["bytes"] for sent in rank["sent"])
    assert plan(tmp_path, "--json") == 0
    [alone] = json.loads(capsys.readouterr().out)["ranks"]
    assert (alone["sent"], alone["seconds_at_least"]) == ([], None)


def test_a_plan_of_one_process_imports_nothing_that_takes_long_and_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    script = "import sys; from forge_core.cli import main; main(['plan', 'job.toml']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    # Each takes a second or more to import; torch's fake tensors bring its compiler in any case
    for module in ("torch.distributed.pipelining", "torch.distributed.tensor.debug", "torchao", "transformers"):
        assert module not in done.stdout.splitlines()[-1].split(), module


def test_it_needs_neither_data_nor_ranks(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    parallel = ("--parallel.fsdp.replicate=2", "--parallel.pp.degree=2", "--parallel.tp.degree=4")
    assert plan(tmp_path, "--world-size=32", "--gpu=h200", *parallel) == 0
    out = capsys.readouterr().out
    assert "ranks      32: pp 2, replicate 2, shard 2, tp 4" in out
    for line in (
        "weights",
        "optimizer state",
        "activations",
        "shard (2 ranks): all-gather",
        "pp (2 ranks, 1 a node): send",
    ):
        assert f"  {line}" in out
    assert "pipeline rank      weights    gradients    optimizer  activations       logits         peak" in out
    assert "of 141.00 GB (H200 SXM): fits" in out
    assert re.search(
        r"  pp \(2 ranks, 1 a node\) +[\d.]+ ms   [\d.]+ [kM]B at 50 GB/s.*; \d+ calls, [\d.]+ ms of lat", out
    )
    # Matrices of 64 columns keep no GPU busy for as long as a kernel takes to start
    assert "launch-bound: starting kernels takes" in out


REPORTING = """
from attrs import frozen
from forge_core import LossComponent
from forge_core.contracts.components import DatasetComponent
from forge_core.contracts.errors import DataError
from forge_core.losses import CrossEntropy

@frozen(kw_only=True)
class Objective(LossComponent):
    def build(self, context):
        return CrossEntropy().build(context)
    def plan_lines(self, job):
        yield "objective", f"of {job.train.steps} step"

@frozen(kw_only=True)
class Source(DatasetComponent):
    text: str
    def plan_data_lines(self, context):
        if not self.text:
            raise DataError("no text")
        yield "letters", f"{len(context.tokenizer.encode(self.text))}"
"""
SOURCE = '[[data.sources]]\ntype = "./reporting.py:Source"\n'


def test_components_of_any_kind_add_lines_and_data_that_are_not_there_end_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reporting.py").write_text(REPORTING)
    sources = f'{SOURCE}text = "abc"\n{SOURCE}name = "other"\ntext = ""\n[data.tokenizer]\n'
    Path("more.toml").write_text(f'[loss]\ntype = "./reporting.py:Objective"\n{sources}type = "bytes"\n')
    assert plan(tmp_path, "more.toml") == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("objective  of 1 step")
    assert lines[first + 1 : first + 3] == ["letters    source 0: 3", "rows       unknown: source other: no text"]
    # A tokenizer that would first be trained on the data
    assert plan(tmp_path, "more.toml", "--data.tokenizer.type=bpe", "--data.tokenizer.vocab_size=512", "--json") == 0
    unknown = [line["text"] for line in json.loads(capsys.readouterr().out)["lines"] if line["title"] == "rows"]
    reason = "the tokenizer is trained on the data, which a plan does not do"
    assert unknown == [f"unknown: source {name}: {reason}" for name in ("0", "other")]


def test_without_a_gpu_there_are_no_times(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert plan(tmp_path) == 0
    assert "at least" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "check"])
def test_all_that_is_impossible_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture, command: str) -> None:
    """What keys, the layout, the batch, and the model itself make impossible, in one answer."""
    stages = (
        "tp.degree=3",
        "cp.degree=2",
        'cp.method="ulysses"',
        "pp.degree=5",
        'float8.exclude=["layers.*.ffn.left"]',
    )
    settings = [*(f"--parallel.{key}" for key in stages), "--train.seq_len=255", "--model.vocab_size=510"]
    settings += ["--train.global_batch_size=6", "--model.attention.heads=3", "--model.attention.head_dim=16"]
    assert plan(tmp_path, "--world-size=30", *settings, "--model.ffn.hidden=176", command=command) == 2
    seen = capsys.readouterr().err
    for path, facts in (
        ("parallel.tp.degree", ["layers.0.ffn.gate.weight", "176 rows", "3 ranks"]),
        ("parallel.cp.method", ["3 tensor-parallel ranks", "1 key/value heads", "2 ranks"]),
        ("parallel.cp.degree", ["2 pieces x tp 3 = 6", "train.seq_len = 255"]),
        ("parallel.pp.degree", ["5 stages", "4 layers"]),
        ("parallel.pp.schedule", ["1f1b", "5 stages", 3]),
        ("parallel.float8.exclude", ["'layers.*.ffn.left'"]),
    ):
        assert any(not lacks(line, path, *facts) for line in seen.splitlines()), (path, seen)
    assert "embedding.weight" not in seen, "510 rows are 170 for each of three"
    assert plan(tmp_path, "--world-size=7", "--parallel.tp.degree=2", command=command) == 2
    assert not lacks(capsys.readouterr().err, "tp 2 = 2", "7 ranks")


def test_a_check_without_such_stages_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace('path = "nowhere"', 'path = "data"'))
    job = f"{str(tmp_path / 'job.toml')!r}, '--world-size=4', '--parallel.fsdp.shard=4'"
    code = f"import sys; from forge_core.cli import main; main(['check', {job}]); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert told.stdout.splitlines()[-1] == "False"


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert plan(tmp_path, "--gpu=a100-40gb", "--model.vocab_size=80000000") == 0
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_what_cannot_be_played_is_unknown_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "deciding.py").write_text(
        "from attrs import frozen\n"
        "from forge_core import LossComponent\n"
        "from forge_core.losses import CrossEntropy\n"
        "@frozen(kw_only=True)\n"
        "class Deciding(LossComponent):\n"
        "    def build(self, context):\n"
        "        inner = CrossEntropy().build(context)\n"
        "        return lambda head, hidden, batch: inner(head, hidden, batch) if hidden.sum().item() else None\n"
    )
    assert plan(tmp_path, f"--loss.type={tmp_path}/deciding.py:Deciding", "--gpu=h200") == 0
    out = capsys.readouterr().out
    assert not lacks(out, "unknown", "DataDependentOutputException")
    assert "  optimizer state" in out


@pytest.mark.parametrize("backend", ["grouped_mm", "loop"])
def test_experts_are_played_as_if_all_had_as_many_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture, backend: str
) -> None:
    experts = ("--model.ffn.type=moe", "--model.ffn.experts=4", "--model.ffn.hidden=64", "--parallel.ep.degree=2")
    backend = f"--model.ffn.backend={backend}"
    assert plan(tmp_path, "--world-size=4", "--gpu=h200", "--parallel.fsdp.shard=4", *experts, backend) == 0
    out = capsys.readouterr().out
    assert "ranks      4: shard 4" in out
    assert "unknown" not in out
    assert "shard (2 ranks): all-to-all" in out


def test_what_leaves_nodes_is_less_where_tokens_cross_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of 16 ranks with an expert each, a token's two are on two; of two nodes, on 2 (1 - 28/120)."""
    experts = ["--model.ffn.type=moe", "--model.ffn.experts=16", "--model.ffn.hidden=64", "--parallel.ep.degree=16"]
    leaving = []
    for per_node in (0, 8):
        sizes = ("--world-size=16", "--parallel.fsdp.shard=16", "--train.global_batch_size=32")
        assert plan(tmp_path, *sizes, "--gpu=h200", *experts, f"--parallel.ep.ranks_per_node={per_node}") == 0
        out = capsys.readouterr().out
        sent = re.findall(r"([\d.]+) ([kM])B to other nodes at 50 GB/s", out)
        leaving.append(sum(float(number) * {"k": 1e3, "M": 1e6}[unit] for number, unit in sent))
    assert leaving[1] / leaving[0] == pytest.approx(1 - 28 / 120, rel=0.05)
    groups = re.findall(r"^  (.* \(.*\)) +[\d.]+ m?s ", out, re.MULTILINE)
    assert groups == ["shard (16 ranks, 8 a node)", "shard (2 ranks, 1 a node)", "shard (8 ranks)"]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_the_pairs_of_positions_that_a_kernel_computes(causal: bool) -> None:
    """torch 2.15 counts this kernel, too, but all pairs."""
    q, k, v = torch.randn(3, 2, 4, 16, 8, requires_grad=True).unbind(0)
    meter = Meter()
    with meter.watching(), FusedAttention():
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
    pairs = 16 * 16 / (2 if causal else 1)
    assert meter.flops == (2 + 5) * 2 * 2 * 4 * 8 * pairs  # products: two forward, five backward


def test_products_of_groups_count_as_many_flops_as_their_rows_make() -> None:
    x, weight = torch.randn(10, 16, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        y = torch.nn.functional.grouped_mm(x, weight.mT, offs=torch.tensor([4, 4, 10], dtype=torch.int32))
        assert counter.get_total_flops() == 2 * 10 * 16 * 8
        y.backward(torch.ones(10, 8))
    assert counter.get_total_flops() == 3 * 2 * 10 * 16 * 8


def test_an_unknown_gpu_is_named_with_those_there_are(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert plan(tmp_path, "--gpu=h300") == 2
    assert not lacks(capsys.readouterr().err, "--gpu h300", "a100")


@pytest.mark.slow
def test_the_stages_of_vision_language_models_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    leave_group()
    monkeypatch.chdir(tmp_path)
    files = [str(CONFIGS / "vlm-8b.toml"), str(CONFIGS / "vlm-stages.toml")]
    assert main(["plan", *files, "--world-size=8", "--train.global_batch_size=32", "--gpu=h100"]) == 0
    out = capsys.readouterr().out
    assert ": fits, " in out
    assert "little left for uncounted memory" not in out
    assert out.count("freeze ") == 3


@pytest.mark.slow
def test_a_config_fits_its_gpu(capsys: pytest.CaptureFixture) -> None:
    """Two micro-batches a rank take as much memory as any number; `docs/plan.md` and `docs/cookbook.md` show more."""
    leave_group()
    config = str(CONFIGS / "llama-7b-1gpu.toml")
    assert main(["plan", config, "--train.global_batch_size=4", "--gpu=h200"]) == 0
    out = capsys.readouterr().out
    assert ": fits, " in out
    assert "little left for uncounted memory" not in out


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("names", "ranks", "sequences", "gpu", "part"),
    [
        (["llama-34b-8gpu"], 8, 16, "h200", 8),
        (["llama-70b-64gpu"], 64, 64, "h200", 8),
        (["vlm-2b", "vlm-stages"], 8, 32, "h100", 8),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_large_configs_fit_their_gpus(
    names: list[str],
    ranks: int,
    sequences: int,
    gpu: str,
    part: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """A model with a part of the layers takes at least this part of the memory of all of them, and is sooner played."""
    leave_group()
    monkeypatch.chdir(tmp_path)
    sized = [f"--train.global_batch_size={sequences}"]
    files = [str(CONFIGS / f"{name}.toml") for name in names]
    whole = load_job(*files, overrides=sized, world_size=ranks, with_data=False).model
    parts = {"model": whole}
    if hasattr(whole, "vision"):
        parts = {"model.language": whole.language, "model.vision.encoder": whole.vision.encoder}
    fewer = [f"--{path}.layers={math.ceil(model.layers / part)}" for path, model in parts.items()]
    assert main(["plan", *files, *sized, *fewer, f"--world-size={ranks}", "--json"]) == 0
    peak = max(rank["peak"] for rank in json.loads(capsys.readouterr().out)["ranks"])
    assert peak * part < (1 - SPARE) * find_gpu(gpu).memory
