"""`forge-run plan`, as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.cli import main
from forge_core.parallel.mesh import leave_group

ROOT = Path(__file__).parents[2]
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


def plan(folder: Path, *arguments: str) -> int:
    leave_group()
    (folder / "job.toml").write_text(JOB)
    return main(["plan", str(folder / "job.toml"), *arguments])


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
        "pp (2 ranks): send",
    ):
        assert f"  {line}" in out
    assert "pipeline rank      weights    gradients    optimizer  activations       logits         peak" in out
    assert "of 141.00 GB (H200 SXM): fits" in out
    assert "over the network, 1 of 2 ranks a node" in out


def test_without_a_gpu_there_are_no_times(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert plan(tmp_path) == 0
    assert "at least" not in capsys.readouterr().out


def test_all_that_cannot_be_built_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert (
        plan(tmp_path, "--world-size=9", "--parallel.tp.degree=3", "--train.seq_len=255", "--parallel.pp.degree=3") == 2
    )
    seen = capsys.readouterr().err
    assert "model.attention.kv_heads: 4 does not divide by the tensor-parallel degree 3" in seen
    assert plan(tmp_path, "--world-size=4", "--parallel.tp.degree=4", "--model.vocab_size=510") == 2
    assert "embedding.weight has 510 rows, which 4 ranks cannot share equally" in capsys.readouterr().err
    assert plan(tmp_path, "--world-size=8", "--parallel.pp.degree=8") == 2
    assert "8 stages, but the model has 4 layers" in capsys.readouterr().err


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
    assert "unknown   the step cannot be played: DataDependentOutputException" in out
    assert "  optimizer state" in out


def test_an_unknown_gpu_is_named_with_those_there_are(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert plan(tmp_path, "--gpu=h300") == 2
    assert "--gpu h300: not in the table; there are a100" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "sequences"),
    [("llama-7b-1gpu", 1, 4), ("llama-8b-4gpu", 4, 16), ("llama-34b-8gpu", 8, 16), ("llama-70b-64gpu", 64, 64)],
)
def test_the_configs_fit_their_gpus(name: str, ranks: int, sequences: int, capsys: pytest.CaptureFixture) -> None:
    """Two micro-batches a rank take as much memory as any number of them, and are sooner played."""
    leave_group()
    config = str(ROOT / "configs" / f"{name}.toml")
    sized = [f"--world-size={ranks}", f"--train.global_batch_size={sequences}", "--gpu=h200"]
    assert main(["plan", config, *sized]) == 0
    out = capsys.readouterr().out
    assert ": fits, " in out
    assert "little for what is not counted" not in out
