"""Dispatchers of tokens to experts, ours and the one of docs/moe.md: the curve of one process, under every layout."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from attrs import frozen

from forge_core.config.load import load_job
from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.layout import Layout
from forge_plugin_moe import MoE
from forge_plugin_parallel import FSDP as Sharded
from forge_plugin_parallel import DispatcherComponent, ExpertParallel
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing.curves import Curve, Difference, train
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems
from forge_testing.runs import tiny_run

MODEL = Transformer(
    dim=16, layers=1, vocab_size=32, attention=GroupedQueryAttention(heads=4), ffn=MoE(experts=4, hidden=16)
)
PAGE = Path(__file__).parents[2] / "docs" / "moe.md"
JOB = """
[job]
name = "dispatched"
output = "{output}"
[train]
steps = 2
global_batch_size = 8
micro_batch_size = 2
seq_len = 16
precision = "fp64"
[model]
type = "transformer"
vocab_size = 32
dim = 16
layers = 2
attention = {{ heads = 4, kv_heads = 2 }}
[model.ffn]
type = "moe"
experts = 4
hidden = 16
shared_experts = 1
capacity_factor = {capacity}
router = {{ type = "sigmoid_topk", top_k = 2, bias_rate = 0.01, sequence_balance = 0.1 }}
[[data.sources]]
type = "forge_testing:Numbers"
[optimizer]
type = "adamw"
lr = 1e-2
"""
FSDP, NODES = "[parallel.fsdp]\n", "ranks_per_node = 2\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the page's file lies, and jobs run."""
    [code] = re.findall(r'```python title="point_to_point.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    (tmp_path / "point_to_point.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def curve(folder: Path, stages: str, capacity: float = 0.0) -> Curve:
    """What a job file comes to with these stages."""
    file = folder / f"job{dist.get_rank() if dist.is_initialized() else ''}.toml"
    file.write_text(JOB.format(output=folder / "runs", capacity=capacity) + stages)
    return train(load_job(file))


def experts(dispatcher: str, ranks: int, more: str = "") -> str:
    return f'[parallel.ep]\ndegree = {ranks}\n{more}dispatcher = {{ type = "{dispatcher}" }}\n'


def check(folder: Path, ranks: int, layouts: dict[str, str], capacity: float = 0.0) -> None:
    """Compares layouts with one process."""
    alone = curve(folder, "", capacity)
    seen = run_on_ranks(ranks, lambda rank: {name: curve(folder, table, capacity) for name, table in layouts.items()})
    for name in layouts:
        difference = Difference.between(seen[0][name], alone)
        assert difference.initial == 0
        assert max(difference.loss, difference.norm, difference.gradient, difference.evaluation) < 1e-9, name
        assert difference.weights < 1e-7, name


STRANGE = "./point_to_point.py:PointToPoint"


def test_any_dispatcher_gives_the_curve_of_one_process(folder: Path) -> None:
    recomputed = FSDP + "[parallel.activation_checkpointing]\n"
    layouts = {
        "gathered": FSDP + experts("all_gather", 2),
        "gathered before shared experts": recomputed + experts("all_gather", 2, "overlap = false\n"),
        "a stranger's": recomputed + experts(STRANGE, 2),
    }
    check(folder, 2, layouts)


@pytest.mark.parametrize("dispatcher", ["all_gather", STRANGE])
@pytest.mark.thorough
def test_the_same_across_nodes_matrices_sequences_and_layers(folder: Path, dispatcher: str) -> None:
    shared = experts(dispatcher, 2)
    layouts = {
        "nodes": FSDP + experts(dispatcher, 4, NODES),
        "edp": FSDP + shared,
        "tp": f"{FSDP}[parallel.tp]\ndegree = 2\n{shared}",
        "cp": f"{FSDP}[parallel.cp]\ndegree = 2\n{experts(dispatcher, 4)}",
        "pp": f"{FSDP}[parallel.pp]\ndegree = 2\n{shared}",
    }
    check(folder, 4, {name: table for name, table in layouts.items() if name != "pp"}, capacity=1.0)
    check(folder, 4, {"pp": layouts["pp"].replace("pp]", "pp]\nschedule = 'gpipe'")})


@frozen(kw_only=True)
class Pairs(DispatcherComponent):
    """Needs two ranks, and a device that is not here."""

    def rank_problems(self, degree: int, ranks_per_node: int) -> Iterable[Problem]:
        """Refuses other numbers of ranks."""
        if degree != 2:
            yield Problem("type", f"sends between 2 ranks, and not {degree}")

    def build(self, context: Any, ranks: Any) -> Any:
        """Refuses every device."""
        raise JobError([Problem(context.path, f"needs a GPU, not {context.device.type}")])


def test_a_dispatcher_refuses_ranks_in_the_check_and_devices_when_it_is_built(folder: Path) -> None:
    def problems(degree: int) -> list[Problem]:
        stage = ExpertParallel(degree=degree, dispatcher=Pairs())
        return list(stage.problems(None, Layout(shard=degree)))  # type: ignore[arg-type]

    assert problems(2) == []
    check_problems(problems(4), at("dispatcher.type", "2 ranks, and not 4"))

    def build(rank: int) -> str:
        stages = {"fsdp": Sharded(), "ep": ExpertParallel(degree=2, dispatcher=Pairs())}
        with pytest.raises(JobError) as error:
            tiny_run(folder, model=MODEL, parallel=stages, global_batch_size=8)
        return str(error.value)

    for message in run_on_ranks(2, build):
        assert "parallel.ep.dispatcher: needs a GPU, not cpu" in message
