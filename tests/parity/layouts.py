"""The table of layouts: stages, and the features that are spread over the rows so that every two meet somewhere.

Layouts of which `test_resharding.py` trains a step, and the vision-language models of `images.py` two, are not repeated
here unless a feature makes them others.

The rows that are not `thorough` have every pair of stages, of features, and of a stage and a feature that any row has,
and each value of `FORMS`; `test_parity.py` sees to that. So one row of four ranks for each pair of stages always runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, Self

import attrs
import torch
from attrs import frozen
from torch import Tensor, nn

from forge_core.contracts.components import RouterComponent
from forge_core.contracts.contexts import BuildContext
from forge_core.contracts.data import Batch
from forge_core.job import Job
from forge_core.parallel.stages import Replicate
from forge_kit.nn.modules import Linear
from forge_plugin_compile import Compile
from forge_plugin_moe import ExpertChoice, Hash, MoE, SigmoidTopK, SoftmaxTopK
from forge_plugin_parallel import (
    FSDP,
    ActivationCheckpointing,
    ContextParallel,
    ExpertParallel,
    PipelineParallel,
    TensorParallel,
)
from forge_plugin_parallel.pp import splits_backward
from forge_plugin_text.packing import Isolate
from forge_plugin_transformer import GroupedQueryAttention, MultiTokenPrediction, Transformer
from forge_testing import Numbers, RandomDocuments, tiny_job
from forge_testing.catalogs import installed

FORMS = {
    "fsdp": ("replicate",),
    "tp": ("sequence_parallel", "loss_parallel"),
    "pp": ("schedule", "degree"),
    "cp": ("method", "degree"),
    "ep": ("degree", "ranks_per_node"),
}
"""Keys of a stage whose values are tried each."""
SEQUENCES = 8
SEQ_LEN = 16


@frozen(kw_only=True)
class Row:
    """A layout, with features of the run."""

    name: str
    ranks: int
    stages: Mapping[str, Any]
    reduction: str
    """Of the reductions that the layout makes, the one that is taken out to see that the row can fail."""
    micro_batch_size: int = 0
    """Sequences; 0: one micro-batch a rank."""
    ignored: int = 1
    """Sequence n begins with n modulo this ignored labels; 1: none."""
    tied: bool = False
    chunked: bool = False
    """Whether the loss is made chunk by chunk."""
    layers: int = 2
    packed: bool = False
    """Whether sequences hold several documents, kept apart."""
    router: RouterComponent | None = None
    """Of experts in every layer; None: there are none."""
    mtp: int = 0
    """Tokens after the next that are predicted too."""
    shared_gate: bool = False
    """Whether shared experts have a gate."""
    biases: bool = False
    """Whether the projections of attention have biases."""
    thorough: bool = False
    """Whether other rows have all of its pairs already: then it runs in `make test-all`, and when what is watched
    has changed (`tests/watched.py`)."""

    @property
    def pairs(self) -> set[frozenset[str]]:
        """What the row tries together: every two of its stages, of its features, and of one and the other; and each
        stage in the form that it has here."""
        stages = {*self.stages, *(["replicate"] if "replicate" in self.name else [])}
        forms = [f"{name} {getattr(stage, key)}" for name, stage in self.stages.items() for key in FORMS.get(name, ())]
        parts = sorted({*stages, *filter(None, self.features.split(", "))})
        return {frozenset(pair) for pair in combinations(parts, 2)} | {frozenset([form]) for form in forms}

    @property
    def features(self) -> str:
        found = {"accumulation": self.micro_batch_size, "ignored labels": self.ignored > 1, "tied": self.tied}
        found |= {"chunked loss": self.chunked, "packed documents": self.packed}
        found["multi-token prediction"] = self.mtp
        if self.router is not None:
            found[f"experts by {type(self.router).__name__}"] = True
        found |= {"gated shared experts": self.shared_gate, "biases": self.biases}
        return ", ".join(name for name, on in found.items() if on)

    def on_rank(self, rank: int) -> Self:
        """The row as one of its ranks runs it: where all trace the same program, the last compiles for all of them.

        Tracing takes most of the time of a compiled row. Only stages of a pipeline are other programs.
        """
        if "compile" not in self.stages or "pp" in self.stages or rank == self.ranks - 1:
            return self
        return attrs.evolve(self, stages={name: stage for name, stage in self.stages.items() if name != "compile"})

    def job(self, folder: str, parallel: bool = True, precision: str = "fp64", steps: int = 5) -> Job:
        """The row's job; without its stages, what it is compared with."""
        attention = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True, bias=self.biases)
        sizes = {"vocab_size": 32, "dim": 16, "layers": self.layers, "tie_embeddings": self.tied}
        if self.router is not None:
            sizes["ffn"] = MoE(experts=4, hidden=16, router=self.router, shared_experts=1, shared_gate=self.shared_gate)
        if self.mtp:
            sizes["mtp"] = MultiTokenPrediction(depth=self.mtp, weight=10.0)  # as large as the losses of `BALANCE`
        model = Transformer(attention=attention, **sizes)
        sources = (Numbers(ignored=self.ignored, held_out=5),)
        data: dict[str, Any] = {"sources": sources}
        if self.packed:
            data = {"sources": (RandomDocuments(held_out=5),), "packing": Isolate()}
        settings: dict[str, Any] = {"model": model, "data": data, "precision": precision}
        settings |= {"steps": steps, "global_batch_size": SEQUENCES, "seq_len": SEQ_LEN, "grad_clip_norm": 0.5}
        if parallel:
            settings |= {"parallel": dict(self.stages), "micro_batch_size": self.micro_batch_size}
        if self.chunked:
            from forge_plugin_losses import ChunkedCrossEntropy

            settings["loss"] = ChunkedCrossEntropy(chunk_tokens=24, z_loss=1e-2)
        return tiny_job(folder, installed(), **settings)


def tp(**keys: Any) -> TensorParallel:
    return TensorParallel(degree=2, **keys)


TRACED = Compile(backend="aot_eager")
CAPTURED = Compile(backend="eager")
"""The graph that `TRACED` has, but not divided into forward and backward, which takes two thirds of the time: for rows
in which compilation meets a stage whose computation in blocks another row of `TRACED` has."""
PLAIN_TP = tp(sequence_parallel=False, loss_parallel=False)


def cp(method: str) -> ContextParallel:
    return ContextParallel(degree=2, method=method)  # type: ignore[arg-type]


def pp(schedule: str, **keys: Any) -> PipelineParallel:
    return PipelineParallel(degree=2, schedule=schedule, **keys)  # type: ignore[arg-type]


def runs_here(stages: Mapping[str, Any]) -> bool:
    """Whether this torch has what the stages need: before 2.13 it does not divide backward passes."""
    divide = any(isinstance(stage, PipelineParallel) and stage.splits_backward for stage in stages.values())
    return splits_backward(torch.__version__) or not divide


def ep(degree: int = 2, ranks_per_node: int = 0) -> ExpertParallel:
    return ExpertParallel(degree=degree, ranks_per_node=ranks_per_node)


@frozen(kw_only=True)
class ToOne(RouterComponent):
    """Every token to the same two experts, the last ones, and none to the others."""

    def build(self, context: BuildContext, dim: int, experts: int) -> nn.Module:
        return _ToOne(dim, experts)


class _ToOne(nn.Module):
    experts_per_token = 2

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.share, self._last = Linear(dim, 2, bias=False), experts - 2

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        weights = self.share(x).softmax(-1)
        return weights, torch.arange(2, device=x.device).expand_as(weights) + self._last


BALANCE: Mapping[str, Any] = {"sequence_balance": 10.0, "batch_balance": 10.0, "z_loss": 10.0}
"""Large, so that a wrong scale cannot hide."""
SIGMOID, SOFTMAX = SigmoidTopK(bias_rate=0.01, **BALANCE), SoftmaxTopK(groups=2, **BALANCE)

FSDP_SCATTER, FSDP_ALL_REDUCE = "fsdp over shard", "fsdp over replicate"
SUM, TP_COMPLETION, TP_SUM, TP_SCATTER = "replicate", "tp of whole weights", "tp of parts", "tp of parts, scattered"
TIE, NORM = "pp of tied weights", "pp of the norm"
ALL_ROWS = [
    Row(
        name="replicate2",
        ranks=2,
        stages={"replicate": Replicate()},
        reduction=SUM,
        ignored=7,
        micro_batch_size=2,
        mtp=1,
    ),
    Row(name="fsdp2", ranks=2, stages={"fsdp": FSDP()}, reduction=FSDP_SCATTER, tied=True, micro_batch_size=2),
    Row(
        name="fsdp2, reduced every micro-batch",
        ranks=2,
        stages={"fsdp": FSDP(reduce_every_micro_batch=True, reshard_after_forward=False, prefetch=1)},
        reduction=FSDP_SCATTER,
        chunked=True,
        micro_batch_size=1,
        ignored=5,
        mtp=2,
    ),
    Row(
        name="fsdp2, checkpointing",
        ranks=2,
        stages={"fsdp": FSDP(), "activation_checkpointing": ActivationCheckpointing()},
        reduction=FSDP_SCATTER,
        chunked=True,
        tied=True,
        mtp=2,
    ),
    Row(name="tp2", ranks=2, stages={"tp": PLAIN_TP}, reduction=TP_SUM, ignored=7, chunked=True, mtp=2),
    Row(name="tp2+loss", ranks=2, stages={"tp": tp(sequence_parallel=False)}, reduction=TP_COMPLETION, tied=True),
    Row(
        name="tp2+sp",
        ranks=2,
        stages={"tp": tp(loss_parallel=False)},
        reduction=TP_COMPLETION,
        micro_batch_size=4,
        biases=True,
    ),
    Row(
        name="tp2+sp+loss, checkpointing",
        ranks=2,
        stages={"tp": tp(), "activation_checkpointing": ActivationCheckpointing(mode="selective", every=2)},
        reduction=TP_SCATTER,
        chunked=True,
        micro_batch_size=2,
        tied=True,
        ignored=5,
        mtp=2,
    ),
    Row(
        name="fsdp2, compiled, checkpointing",
        ranks=2,
        stages={"fsdp": FSDP(), "compile": TRACED, "activation_checkpointing": ActivationCheckpointing()},
        reduction=FSDP_SCATTER,
        ignored=7,
        chunked=True,
    ),
    Row(
        name="tp2+sp+loss, compiled",
        ranks=2,
        stages={"tp": tp(), "compile": TRACED},
        reduction=TP_SCATTER,
        tied=True,
        mtp=1,
    ),
    Row(name="cp2, ring", ranks=2, stages={"cp": cp("ring")}, reduction=SUM, packed=True, micro_batch_size=2, mtp=2),
    Row(name="cp2, all-gather", ranks=2, stages={"cp": cp("all_gather")}, reduction=SUM, ignored=7, tied=True),
    Row(name="cp2, ulysses", ranks=2, stages={"cp": cp("ulysses")}, reduction=SUM, packed=True, chunked=True, mtp=1),
    Row(name="cp2, ring, whole", ranks=2, stages={"cp": cp("ring")}, reduction=SUM, chunked=True, tied=True),
    Row(
        name="cp4, ring",
        ranks=4,
        stages={"cp": ContextParallel(degree=4)},
        reduction=SUM,
        packed=True,
        tied=True,
        mtp=2,
    ),
    Row(
        name="tp2 x cp2",
        ranks=4,
        stages={"tp": tp(), "cp": cp("all_gather")},
        reduction=TP_COMPLETION,
        packed=True,
        micro_batch_size=2,
        chunked=True,
        mtp=1,
    ),
    Row(
        name="hsdp 2x2",
        ranks=4,
        stages={"fsdp": FSDP(replicate=2)},
        reduction=FSDP_ALL_REDUCE,
        tied=True,
        micro_batch_size=1,
        chunked=True,
        mtp=1,
    ),
    Row(name="replicate2 x tp2", ranks=4, stages={"tp": tp()}, reduction=SUM, tied=True, ignored=5),
    Row(
        name="pp2, gpipe",
        ranks=2,
        stages={"pp": pp("gpipe")},
        reduction=NORM,
        layers=3,
        packed=True,
        micro_batch_size=2,
    ),
    Row(
        name="pp2, 1f1b",
        ranks=2,
        stages={"pp": pp("1f1b")},
        reduction=TIE,
        tied=True,
        micro_batch_size=2,
        ignored=7,
        mtp=2,
    ),
    Row(
        name="pp3, 1f1b",  # the rank between the ends has no part of what ties them
        ranks=3,
        stages={"pp": PipelineParallel(degree=3)},
        reduction=TIE,
        layers=3,
        tied=True,
        micro_batch_size=2,
        packed=True,
    ),
    Row(
        name="pp3, gpipe",
        ranks=3,
        stages={"pp": PipelineParallel(degree=3, schedule="gpipe")},
        reduction=NORM,
        layers=3,
        micro_batch_size=2,
        mtp=1,
    ),
    Row(
        name="pp4, 1f1b",
        ranks=4,
        stages={"pp": PipelineParallel(degree=4)},
        reduction=TIE,
        layers=4,
        tied=True,
        micro_batch_size=2,
        ignored=5,
        mtp=1,
    ),
    Row(
        name="pp2, interleaved 1f1b",
        ranks=2,
        stages={"pp": pp("interleaved_1f1b", layers=(1, 2, 1, 1))},
        reduction=TIE,
        layers=5,
        tied=True,
        chunked=True,
        micro_batch_size=2,
    ),
    Row(
        name="pp2, looped bfs, checkpointing",
        ranks=2,
        stages={"pp": pp("looped_bfs"), "activation_checkpointing": ActivationCheckpointing()},
        reduction=NORM,
        layers=4,
        packed=True,
        micro_batch_size=1,
        mtp=2,
    ),
    Row(
        name="pp2, interleaved zero-bubble",
        ranks=2,
        stages={"pp": pp("interleaved_zero_bubble")},
        reduction=NORM,
        layers=5,
        chunked=True,
        ignored=5,
        micro_batch_size=2,
        mtp=2,
    ),
    Row(
        name="pp2, zbv, checkpointing",
        ranks=2,
        stages={"pp": pp("zbv"), "activation_checkpointing": ActivationCheckpointing()},
        reduction=NORM,
        layers=4,
        tied=True,
        packed=True,
        micro_batch_size=1,
    ),
    Row(
        name="pp2, dualpipe-v",
        ranks=2,
        stages={"pp": pp("dualpipe_v")},
        reduction=NORM,
        layers=4,
        ignored=7,
        chunked=True,
        micro_batch_size=1,
        mtp=1,
    ),
    Row(
        name="pp2, 1f1b, compiled",
        ranks=2,
        stages={"pp": pp("1f1b"), "compile": CAPTURED},
        reduction=NORM,
        micro_batch_size=2,
        packed=True,
        chunked=True,
    ),
    Row(
        name="fsdp2 x pp2, zbv",
        ranks=4,
        thorough=True,
        stages={"fsdp": FSDP(), "pp": pp("zbv")},
        reduction=FSDP_SCATTER,
        layers=4,
        chunked=True,
        packed=True,
        micro_batch_size=1,
        mtp=2,
    ),
    Row(
        name="fsdp2 x pp2, resharded, interleaved 1f1b",
        ranks=4,
        thorough=True,
        stages={"fsdp": FSDP(reshard_after_forward=True), "pp": pp("interleaved_1f1b")},
        reduction=FSDP_SCATTER,
        layers=4,
        micro_batch_size=2,
    ),
    Row(
        name="tp2 x pp2",
        ranks=4,
        stages={"tp": tp(), "pp": pp("1f1b")},
        reduction=TIE,
        tied=True,
        micro_batch_size=2,
        ignored=7,
        mtp=1,
    ),
    Row(
        name="tp2 x pp2, zero-bubble",
        ranks=4,
        thorough=True,
        stages={"tp": tp(), "pp": pp("interleaved_zero_bubble")},
        reduction=TP_COMPLETION,
        layers=4,
        packed=True,
        micro_batch_size=2,
        mtp=1,
    ),
    Row(
        name="cp2 x pp2",
        ranks=4,
        stages={"cp": cp("ring"), "pp": pp("1f1b")},
        reduction=SUM,
        packed=True,
        chunked=True,
        micro_batch_size=2,
        mtp=2,
    ),
    Row(name="replicate2 x pp2", ranks=4, stages={"pp": pp("gpipe")}, reduction=TIE, tied=True, micro_batch_size=1),
    Row(
        name="fsdp2/ep2",
        ranks=2,
        stages={"fsdp": FSDP(), "ep": ep()},
        reduction=FSDP_SCATTER,
        router=SIGMOID,
        micro_batch_size=2,
        ignored=7,
        mtp=1,
    ),
    Row(
        name="fsdp2/ep2, checkpointing",
        ranks=2,
        stages={"fsdp": FSDP(), "ep": ep(), "activation_checkpointing": ActivationCheckpointing()},
        reduction=FSDP_SCATTER,
        router=SOFTMAX,
        tied=True,
        chunked=True,
    ),
    Row(
        name="fsdp2/ep2, compiled",
        ranks=2,
        stages={"fsdp": FSDP(), "ep": ep(), "compile": attrs.evolve(CAPTURED, fullgraph=False)},
        reduction=FSDP_SCATTER,
        router=SIGMOID,
        micro_batch_size=1,
        packed=True,
    ),
    Row(
        name="fsdp2/ep2, all tokens to one rank",
        ranks=2,
        stages={"fsdp": FSDP(), "ep": ep()},
        reduction=FSDP_SCATTER,
        router=ToOne(),
        packed=True,
        micro_batch_size=1,
    ),
    Row(
        name="tp2+loss, experts",
        ranks=2,
        stages={"tp": tp(sequence_parallel=False)},
        reduction=TP_COMPLETION,
        router=SOFTMAX,
        shared_gate=True,
        micro_batch_size=2,
        tied=True,
    ),
    Row(
        name="pp2, zbv, experts",
        ranks=2,
        stages={"pp": pp("zbv")},
        reduction=NORM,
        layers=4,
        router=SIGMOID,
        ignored=5,
        micro_batch_size=2,
        mtp=1,
    ),
    Row(
        name="fsdp4/ep4",
        ranks=4,
        stages={"fsdp": FSDP(), "ep": ep(4)},
        reduction=FSDP_SCATTER,
        router=ExpertChoice(z_loss=10.0),
        tied=True,
        ignored=7,
    ),
    Row(
        name="fsdp4/ep4, two nodes",
        ranks=4,
        stages={"fsdp": FSDP(), "ep": ep(4, ranks_per_node=2)},
        reduction=FSDP_SCATTER,
        router=SIGMOID,
        shared_gate=True,
        micro_batch_size=1,
        packed=True,
    ),
    Row(
        name="fsdp4/ep4, two nodes, all tokens to one",
        ranks=4,
        stages={"fsdp": FSDP(), "ep": ep(4, ranks_per_node=2), "activation_checkpointing": ActivationCheckpointing()},
        reduction=FSDP_SCATTER,
        router=ToOne(),
        ignored=7,
    ),
    Row(
        name="fsdp2 x tp2/ep2, gated",
        ranks=4,
        stages={"fsdp": FSDP(), "tp": tp(), "ep": ep()},
        reduction=TP_COMPLETION,
        router=SIGMOID,
        shared_gate=True,
        tied=True,
    ),
    Row(
        name="hsdp 2x2/ep2",
        ranks=4,
        stages={"fsdp": FSDP(replicate=2), "ep": ep()},
        reduction=FSDP_ALL_REDUCE,
        router=SIGMOID,
        micro_batch_size=1,
        chunked=True,
    ),
    Row(
        name="fsdp2 x pp2/ep2, zero-bubble, checkpointing",
        ranks=4,
        stages={
            "fsdp": FSDP(),
            "pp": pp("interleaved_zero_bubble"),
            "ep": ep(),
            "activation_checkpointing": ActivationCheckpointing(),
        },
        reduction=FSDP_SCATTER,
        layers=4,
        router=Hash(top_k=2),
        micro_batch_size=1,
        packed=True,
    ),
    Row(
        name="fsdp2 x cp2/ep2",
        ranks=4,
        stages={"fsdp": FSDP(), "cp": cp("ring"), "ep": ep()},
        reduction=FSDP_SCATTER,
        router=SIGMOID,
        micro_batch_size=2,
        chunked=True,
        mtp=2,
    ),
    Row(
        name="fsdp2 x cp2/ep4",
        ranks=4,
        stages={"fsdp": FSDP(), "cp": cp("ulysses"), "ep": ep(4)},
        reduction=FSDP_SCATTER,
        router=SOFTMAX,
        packed=True,
    ),
]
ROWS = [row for row in ALL_ROWS if runs_here(row.stages)]
