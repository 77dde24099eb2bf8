"""One checkpoint folder for all layouts: trains under one, continues under another, and prints how far the result is
from one process that was never interrupted.

python tests/parity/resharding.py

In float64, two steps under each layout: the largest difference of losses, gradient norms and held-out losses, and of
anything in the last checkpoint: weights and the optimizer's moments.
"""

from __future__ import annotations

import io
import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen
from images import FUSIONS, row
from layouts import runs_here
from torch import Tensor

from forge_core.engine.trainer import Trainer
from forge_core.job import Job
from forge_kit.tools.checkpoints import stored_tensors
from forge_kit.tools.whole_tensors import read_whole
from forge_plugin_moe import MoE, SigmoidTopK
from forge_plugin_parallel import FSDP, ContextParallel, ExpertParallel, PipelineParallel, TensorParallel
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.catalogs import installed
from forge_testing.processes import run_on_ranks

DENSE, EXPERTS = "dense", "experts"
"""Models besides the fusions of `images.FUSIONS`."""
STEPS = 2
"""Under each of the two layouts."""


Outcome = tuple[list[float], dict[str, Tensor]]
"""Losses, norms and held-out losses of all steps; and everything in the last checkpoint."""


@frozen
class Layout:
    name: str
    ranks: int
    stages: Mapping[str, Any]


def runs(layout: Layout) -> bool:
    """Whether this torch has what the layout needs."""
    return runs_here(layout.stages)


def pp(schedule: str = "1f1b") -> dict[str, Any]:
    return {"pp": PipelineParallel(degree=2, schedule=schedule)}  # type: ignore[arg-type]


EP2, EP4 = {"ep": ExpertParallel(degree=2)}, {"ep": ExpertParallel(degree=4)}
ONE = Layout("one process", 1, {})
FSDP2, FSDP4 = Layout("fsdp2", 2, {"fsdp": FSDP()}), Layout("fsdp4", 4, {"fsdp": FSDP()})
HSDP = Layout("hsdp 2x2", 4, {"fsdp": FSDP(replicate=2)})
TP2, TP4 = Layout("tp2", 2, {"tp": TensorParallel(degree=2)}), Layout("tp4", 4, {"tp": TensorParallel(degree=4)})
PP2, PP2_ZBV = Layout("pp2", 2, pp()), Layout("pp2, zbv", 2, pp("zbv"))
FSDP2_TP2 = Layout("fsdp2 x tp2", 4, {"fsdp": FSDP(), "tp": TensorParallel(degree=2)})
FSDP2_PP2 = Layout("fsdp2 x pp2", 4, {"fsdp": FSDP(), **pp()})
TP2_CP2 = Layout("tp2 x cp2", 4, {"tp": TensorParallel(degree=2), "cp": ContextParallel(degree=2)})
FSDP2_EP2 = Layout("fsdp2/ep2", 2, {"fsdp": FSDP(), **EP2})
FSDP4_EP2 = Layout("fsdp4/ep2", 4, {"fsdp": FSDP(), **EP2})
FSDP4_EP4 = Layout("fsdp4/ep4", 4, {"fsdp": FSDP(), **EP4})
FSDP2_PP2_EP2 = Layout("fsdp2 x pp2/ep2", 4, {"fsdp": FSDP(), **pp(), **EP2})
FSDP2_TP2_EP2 = Layout("fsdp2 x tp2/ep2", 4, {"fsdp": FSDP(), "tp": TensorParallel(degree=2), **EP2})
PAIRS = [
    (ONE, FSDP4),
    (FSDP4, ONE),
    (TP2, FSDP2),
    (FSDP2, TP2),
    (PP2, FSDP2_TP2),
    (FSDP2_TP2, PP2),
    (FSDP2_PP2, TP4),
    (TP4, FSDP2_PP2),
    (PP2_ZBV, PP2),
    (HSDP, TP2_CP2),
]
PAIRS_WITH_EXPERTS = [
    (FSDP4_EP4, ONE),
    (ONE, FSDP4_EP4),
    (FSDP4_EP4, FSDP2_EP2),
    (FSDP2_EP2, FSDP4_EP4),
    (FSDP4_EP4, FSDP2_PP2_EP2),
    (FSDP2_PP2_EP2, FSDP4_EP4),
]
PAIRS_OF = {
    DENSE: PAIRS,
    EXPERTS: PAIRS_WITH_EXPERTS,
    "joint": [(FSDP4, PP2), (PP2, FSDP2_TP2), (FSDP2_TP2, ONE)],
    "cross_attention": [(PP2_ZBV, FSDP2_TP2), (TP2_CP2, FSDP2_PP2), (FSDP2_PP2, HSDP)],
    "mot": [(TP2, FSDP4), (FSDP4, PP2_ZBV), (PP2, TP2_CP2)],
    "moma": [(FSDP2_EP2, ONE), (FSDP2_TP2_EP2, FSDP2_PP2_EP2), (FSDP2_PP2_EP2, FSDP2_EP2)],
}


@frozen
class Difference:
    """The largest differences."""

    numbers: float
    """Of losses, gradient norms and held-out losses."""
    state: float
    """Of weights and moments in the last checkpoint."""


@frozen
class Part:
    """A part of a run: up to a step under one layout."""

    model: str
    folder: Path
    layout: Layout
    steps: int
    """Steps of the run at the end of the part."""


def train(*parts: Part) -> None:
    """Run parts that take equally many ranks in the same processes, one after the other, without output.

    Each continues from the newest checkpoint of its folder.
    """
    (ranks,) = {part.layout.ranks for part in parts}

    def resume(rank: int) -> None:
        with redirect_stdout(io.StringIO()):
            for part in parts:
                Trainer(job(part.folder, part.layout, part.steps, part.model), echo=len).run()

    if ranks == 1:
        resume(0)  # in this process, from which ranks inherit what a run imports
    else:
        run_on_ranks(ranks, resume)


def train_chains(folder: Path, chains: Mapping[str, Sequence[Layout]]) -> None:
    """Train each model for one step under each layout of its chain, each from the checkpoint of the layout before.

    Chains are independent, and a start of four ranks takes as long as a step: so each start runs, of every chain, all
    layouts that come next and take as many ranks.
    """
    waiting = {
        model: [Part(model, folder / model, layout, step) for step, layout in enumerate(layouts, 1)]
        for model, layouts in chains.items()
    }
    while any(waiting.values()):
        wanted = Counter(parts[0].layout.ranks for parts in waiting.values() if parts)
        ranks = 1 if 1 in wanted else wanted.most_common(1)[0][0]  # one process needs no start
        together: list[Part] = []
        for parts in waiting.values():
            while parts and parts[0].layout.ranks == ranks:
                together.append(parts.pop(0))
        train(*together)


def job(folder: Path, layout: Layout, steps: int, model: str) -> Job:
    if model in FUSIONS:
        images = row(layout.name, layout.ranks, model, layout.stages, "", layers=4, micro_batch_size=2)
        found = images.job(str(folder), steps=steps)
        return attrs.evolve(found, eval=attrs.evolve(found.eval, interval=1))
    attention = GroupedQueryAttention(heads=4, kv_heads=4, qk_norm=True)
    sizes: dict[str, Any] = {"vocab_size": 32, "dim": 16, "layers": 4, "tie_embeddings": True}
    if model == EXPERTS:
        router = SigmoidTopK(bias_rate=0.01, batch_balance=1.0)
        sizes["ffn"] = MoE(experts=8, hidden=16, router=router, shared_experts=1, first_dense=1)
    language = Transformer(attention=attention, **sizes)
    settings: dict[str, Any] = {"steps": steps, "global_batch_size": 8, "seq_len": 16, "precision": "fp64"}
    settings |= {"micro_batch_size": 2, "grad_clip_norm": 0.5, "eval": {"interval": 1}}
    data = {"sources": (Numbers(ignored=5, held_out=5),)}
    return tiny_job(str(folder), installed(), model=language, data=data, parallel=dict(layout.stages), **settings)


def uninterrupted(folder: Path, model: str) -> Outcome:
    """What one process comes to."""
    train(Part(model, folder, ONE, 2 * STEPS))
    return outcome(folder)


def continued(folder: Path, first: Layout, second: Layout, model: str) -> Outcome:
    """What two layouts come to, the second with the checkpoint of the first."""
    train(Part(model, folder, first, STEPS))
    train(Part(model, folder, second, 2 * STEPS))
    return outcome(folder)


def outcome(folder: Path) -> Outcome:
    """All steps' numbers, and everything in the last checkpoint."""
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    numbers = [record[key] for record in records for key in ("loss", "grad_norm", "eval/loss") if key in record]
    checkpoint = folder / f"run/checkpoints/step-{records[-1]['step']}"
    stored = stored_tensors(checkpoint)
    return numbers, read_whole(checkpoint, stored, stored)


def compare(found: Outcome, expected: Outcome) -> Difference:
    assert found[1].keys() == expected[1].keys()
    return Difference(
        numbers=max(abs(a - b) for a, b in zip(found[0], expected[0], strict=True)),
        state=max((found[1][name] - tensor).abs().max().item() for name, tensor in expected[1].items()),
    )


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, gloo on the CPU\n")
    print("| model | saved under | continued under | losses and norms | weights and moments |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        possible = {name: [pair for pair in pairs if all(map(runs, pair))] for name, pairs in PAIRS_OF.items()}
        for model, pairs in possible.items():
            expected = uninterrupted(Path(temporary) / model, model)
            for first, second in pairs:
                folder = Path(tempfile.mkdtemp(dir=temporary))
                found = compare(continued(folder, first, second, model), expected)
                print(
                    f"| {model} | {first.name} | {second.name} | {found.numbers:.0e} | {found.state:.0e} |", flush=True
                )


if __name__ == "__main__":
    main()
