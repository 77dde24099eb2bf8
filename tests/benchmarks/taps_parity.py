"""Taps under every layout beside one process, in float64: the largest difference of each point, and what else differs.

python tests/benchmarks/taps_parity.py                # the table point x layout
python tests/benchmarks/taps_parity.py tp2 "pp2 x cp2"  # some rows
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # ranks are forks, in which a pool of compilers hangs

import torch
from attrs import field, frozen
from safetensors.torch import load_file
from torch import Tensor

from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_plugin_compile import Compile
from forge_plugin_moe import MoE, SigmoidTopK
from forge_plugin_parallel import (
    FSDP,
    ActivationCheckpointing,
    ContextParallel,
    ExpertParallel,
    PipelineParallel,
    TensorParallel,
)
from forge_plugin_taps import Store, Taps
from forge_plugin_text.packing import Isolate
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, RandomDocuments, tiny_job
from forge_testing.processes import run_on_ranks

SEQUENCES, SEQ_LEN, STEPS = 8, 16, 3
FULL, SELECTIVE = ActivationCheckpointing(), ActivationCheckpointing(mode="selective")
AOT, INDUCTOR = Compile(backend="aot_eager"), Compile()
BROKEN = Compile(backend="aot_eager", fullgraph=False)


def tp(**keys: Any) -> TensorParallel:
    return TensorParallel(degree=2, **keys)


def pp(schedule: str = "1f1b", degree: int = 2) -> PipelineParallel:
    return PipelineParallel(degree=degree, schedule=schedule)  # type: ignore[arg-type]


def cp(method: str = "ring", degree: int = 2) -> ContextParallel:
    return ContextParallel(degree=degree, method=method)  # type: ignore[arg-type]


@frozen
class Case:
    """A layout, and the model that it runs."""

    ranks: int
    stages: Mapping[str, Any] = field(factory=dict)
    micro_batch_size: int = 0
    experts: bool = False
    packed: bool = False
    """Whether sequences hold several documents, kept apart."""
    layers: int = 4
    tapped: bool = True

    @property
    def kind(self) -> tuple[bool, bool, int]:
        """What of it one process has too."""
        return self.experts, self.packed, self.layers

    @property
    def reference(self) -> Case:
        """What it is compared with: one process, without any stage."""
        return Case(1, experts=self.experts, packed=self.packed, layers=self.layers)

    def job(self, folder: str) -> Any:
        sizes: dict[str, Any] = {"ffn": MoE(experts=4, hidden=16, router=SigmoidTopK())} if self.experts else {}
        attention = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True)
        model = Transformer(vocab_size=32, dim=16, layers=self.layers, init_std=0.2, attention=attention, **sizes)
        taps = Taps(interval=2, positions=3, points=("*",), gradients=("*",), sinks={"store": Store()})
        data: dict[str, Any] = {"sources": (Numbers(ignored=3, held_out=5),)}
        if self.packed:
            data = {"sources": (RandomDocuments(held_out=5),), "packing": Isolate()}
        settings: dict[str, Any] = {"model": model, "data": data, "precision": "fp64", "steps": STEPS}
        settings |= {"global_batch_size": SEQUENCES, "seq_len": SEQ_LEN, "micro_batch_size": self.micro_batch_size}
        stages = {**self.stages, **({"taps": taps} if self.tapped else {})}
        return tiny_job(folder, Catalog.installed(), parallel=stages, checkpoint={"interval": 0}, **settings)


CASES = {
    "one process": Case(1),
    "micro-batches": Case(1, {}, 2),
    "aot_eager": Case(1, {"compile": AOT}),
    "inductor": Case(1, {"compile": INDUCTOR}),
    "ac full": Case(1, {"activation_checkpointing": FULL}, 2),
    "ac full, aot_eager": Case(1, {"activation_checkpointing": FULL, "compile": AOT}, 2),
    "ac selective, inductor": Case(1, {"activation_checkpointing": SELECTIVE, "compile": INDUCTOR}, 2),
    "packed, aot_eager": Case(1, {"compile": AOT}, 4, packed=True),
    "fsdp2": Case(2, {"fsdp": FSDP()}, 2),
    "fsdp2, aot_eager": Case(2, {"fsdp": FSDP(), "compile": AOT}, 2),
    "fsdp2, ac, inductor": Case(2, {"fsdp": FSDP(), "compile": INDUCTOR, "activation_checkpointing": FULL}, 2),
    "tp2": Case(2, {"tp": tp(sequence_parallel=False)}, 4),
    "tp2+sp": Case(2, {"tp": tp()}, 4),
    "tp2+sp, inductor": Case(2, {"tp": tp(), "compile": INDUCTOR}, 4),
    "tp2+sp, ac selective, aot_eager": Case(2, {"tp": tp(), "compile": AOT, "activation_checkpointing": SELECTIVE}, 4),
    "pp2 1f1b": Case(2, {"pp": pp()}, 2),
    "pp2 1f1b, aot_eager": Case(2, {"pp": pp(), "compile": AOT}, 2),
    "pp2 1f1b, ac, aot_eager": Case(2, {"pp": pp(), "activation_checkpointing": FULL, "compile": AOT}, 2),
    "pp2 1f1b, ac, inductor": Case(2, {"pp": pp(), "activation_checkpointing": FULL, "compile": INDUCTOR}, 2),
    "pp2 interleaved zb": Case(2, {"pp": pp("interleaved_zero_bubble")}, 2),
    "pp2 interleaved zb, ac": Case(2, {"pp": pp("interleaved_zero_bubble"), "activation_checkpointing": FULL}, 2),
    "pp3 1f1b": Case(3, {"pp": pp(degree=3)}, 2),
    "cp2 ring": Case(2, {"cp": cp()}, 4),
    "cp2 ring, packed": Case(2, {"cp": cp()}, 4, packed=True),
    "cp2 all_gather, aot_eager": Case(2, {"cp": cp("all_gather"), "compile": AOT}, 4),
    "cp2 ulysses": Case(2, {"cp": cp("ulysses")}, 4),
    "cp2 ulysses, packed": Case(2, {"cp": cp("ulysses")}, 4, packed=True),
    "cp4 ring": Case(4, {"cp": cp(degree=4)}, 4),
    "fsdp2/ep2": Case(2, {"fsdp": FSDP(), "ep": ExpertParallel(degree=2)}, 2, experts=True),
    "fsdp2 x tp2": Case(4, {"fsdp": FSDP(), "tp": tp()}, 2),
    "fsdp2 x tp2, inductor": Case(4, {"fsdp": FSDP(), "tp": tp(), "compile": INDUCTOR}, 2),
    "fsdp2 x pp2": Case(4, {"fsdp": FSDP(), "pp": pp()}, 2),
    "fsdp2 x pp2, ac, aot_eager": Case(
        4, {"fsdp": FSDP(), "pp": pp(), "activation_checkpointing": FULL, "compile": AOT}, 2
    ),
    "fsdp2 x cp2": Case(4, {"fsdp": FSDP(), "cp": cp()}, 2),
    "hsdp 2x2": Case(4, {"fsdp": FSDP(replicate=2)}, 1),
    "tp2 x pp2": Case(4, {"tp": tp(), "pp": pp()}, 2),
    "tp2 x cp2": Case(4, {"tp": tp(), "cp": cp()}, 4),
    "pp2 x cp2": Case(4, {"pp": pp(), "cp": cp()}, 2),
    "fsdp4/ep2": Case(4, {"fsdp": FSDP(), "ep": ExpertParallel(degree=2)}, 2, experts=True),
    "fsdp2/ep2 x tp2": Case(4, {"fsdp": FSDP(), "tp": tp(), "ep": ExpertParallel(degree=2)}, 2, experts=True),
    "fsdp2/ep2 x pp2": Case(4, {"fsdp": FSDP(), "pp": pp(), "ep": ExpertParallel(degree=2)}, 2, experts=True),
    "fsdp/ep2 x cp2": Case(4, {"fsdp": FSDP(), "cp": cp(), "ep": ExpertParallel(degree=2)}, 2, experts=True),
}


@frozen
class Result:
    """What one layout has stored."""

    folder: Path
    losses: Sequence[float]
    graphs: Sequence[int]
    """Unique graphs of each rank."""

    @property
    def steps(self) -> list[Path]:
        return sorted(self.folder.glob("*/taps/step-*"))

    def tensors(self, step: Path) -> dict[str, Tensor]:
        return {name: tensor for path in sorted(step.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def run_together(cases: Mapping[Any, Case], folder: Path) -> dict[Any, Result]:
    """Train layouts, each with a store; those of equally many ranks in the same processes."""
    graphs: dict[Any, list[int]] = {}
    for ranks in sorted({case.ranks for case in cases.values()}):
        own = {name: case for name, case in cases.items() if case.ranks == ranks}
        folders = {name: str(folder / str(number)) for number, name in enumerate(cases)}
        found = run_on_ranks(ranks, lambda rank: [_train(own[name], folders[name]) for name in own])  # noqa: B023
        graphs |= dict(zip(own, map(list, zip(*found, strict=True)), strict=True))
    return {name: _result(folder / str(number), graphs[name]) for number, name in enumerate(cases)}


def _result(folder: Path, graphs: Sequence[int]) -> Result:
    (metrics,) = folder.glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Result(folder, [line["loss"] for line in lines if "loss" in line], graphs)


def _train(case: Case, folder: str) -> int:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        Trainer(case.job(folder), echo=lambda text: None).run()
    return int(counters["stats"].get("unique_graphs", 0))


def differences(found: Result, expected: Result) -> tuple[dict[str, float], list[str]]:
    """Returns the largest difference by kind of point, and whatever is not alike otherwise."""
    worst: dict[str, float] = {}
    wrong = [] if [step.name for step in found.steps] == [step.name for step in expected.steps] else ["steps"]
    for own, theirs in zip(found.steps, expected.steps, strict=False):
        ours, reference = found.tensors(own), found.tensors(theirs)
        wrong += sorted(ours.keys() ^ reference.keys())
        for name in ours.keys() & reference.keys():
            a, b = ours[name], reference[name]
            if a.shape != b.shape:
                wrong.append(f"{name}: {tuple(a.shape)}")
            elif not a.is_floating_point():
                wrong += [] if torch.equal(a, b) else [name]
            else:
                point = re.sub(r"^layers\.\d+\.", "", name)
                worst[point] = max(worst.get(point, 0.0), (a - b).abs().max().item())
    return worst, wrong


def main(names: Sequence[str]) -> int:
    references: dict[Any, Result] = {}
    failed = 0
    table: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names or CASES):
            case, began = CASES[name], time.time()
            if case.kind not in references:
                references |= run_together({case.kind: case.reference}, Path(folder) / f"reference-{len(references)}")
            expected = references[case.kind]
            try:
                found = run_together({name: case}, Path(folder) / str(number))[name]
            except AssertionError as error:
                failed += 1
                print(f"{name:28} FAILED {str(error).strip().splitlines()[-1][:300]}", flush=True)
                continue
            worst, wrong = differences(found, expected)
            table[name] = worst
            top = max(worst.values(), default=float("nan"))
            loss = max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True))
            failed += bool(wrong) or not top <= 1e-12
            verdict = f"{top:.1e}" if top else "equal to the bit"
            graphs = f"  graphs {max(found.graphs)}" if max(found.graphs) else ""
            print(
                f"{name:28} {verdict:16} losses {loss:.0e}{graphs}  {time.time() - began:.0f} s  {wrong[:6] or ''}",
                flush=True,
            )
    points = sorted({point for row in table.values() for point in row})
    print("\n| layout | " + " | ".join(points) + " |\n|" + "---|" * (len(points) + 1))
    for name, row in table.items():
        cells = [("0" if row[p] == 0 else f"{row[p]:.0e}") if p in row else "" for p in points]
        print(f"| {name} | " + " | ".join(cells) + " |")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
