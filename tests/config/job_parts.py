"""Small components with realistic names, and the catalog that the tests of the job file use.

The catalog is made in memory, so that the messages the tests expect do not depend on what is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import define, field, frozen
from attrs.validators import ge, gt, lt, matches_re, min_len

from forge_core.contracts.components import (
    Component,
    DatasetComponent,
    EvaluationComponent,
    ExecutorComponent,
    LoadComponent,
    LoaderComponent,
    LoggerComponent,
    LossComponent,
    ModelComponent,
    OptimizerComponent,
    PackingComponent,
    ParallelComponent,
    Plugin,
    RouterComponent,
    SchedulerComponent,
    StorageComponent,
    TokenizerComponent,
    TrainingHook,
    default_type,
)
from forge_core.contracts.errors import Problem
from forge_core.contracts.hookspecs import hookimpl
from forge_core.plugins.catalog import Catalog, Distribution, Offer

if TYPE_CHECKING:
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


# --- the core's own, in small -------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Constant(SchedulerComponent):
    """The base rate throughout."""

    warmup_steps: int = field(default=0, validator=ge(0))


@frozen(kw_only=True)
class CrossEntropy(LossComponent):
    """Mean negative log-likelihood."""


@frozen(kw_only=True)
class Plain(ExecutorComponent):
    """One micro-batch after the other."""


@frozen(kw_only=True)
class Thread(LoaderComponent):
    """Reads ahead in a thread."""


@frozen(kw_only=True)
class Parts(LoadComponent):
    """Weights of another run."""

    path: str
    exclude: tuple[str, ...] = ()


@frozen(kw_only=True)
class Concatenate(PackingComponent):
    """Documents one after the other."""

    needs_boundaries: ClassVar[bool] = False
    accepts_sequences: ClassVar[bool] = True


@frozen(kw_only=True)
class HeldOut(EvaluationComponent):
    """Loss and perplexity of the held-out sequences."""

    sequences: int = field(default=64, validator=gt(0))


@frozen(kw_only=True)
class Local(StorageComponent):
    """A folder."""

    folder: Path = Path("checkpoints")


@frozen(kw_only=True)
class Console(LoggerComponent):
    """A line now and then."""

    every: int = field(default=1, validator=gt(0))


@frozen(kw_only=True)
class JsonLines(LoggerComponent):
    """`metrics.jsonl`."""


@frozen(kw_only=True)
class Replicate(ParallelComponent):
    """Whole copies of the model."""

    owns_reduction: ClassVar[bool] = True
    degree: int | Literal["auto"] = "auto"

    def degrees(self) -> Mapping[str, int | str]:
        return {"replicate": self.degree}


# --- forge-plugin-transformer -------------------------------------------------------------------------------------


@frozen(kw_only=True)
class FFNComponent(Component):
    """The feed-forward part of a block."""

    kind = "ffn"


@frozen(kw_only=True)
class SwiGLU(FFNComponent):
    """Gated linear unit (Shazeer 2020)."""

    hidden: int = field(default=0, validator=ge(0))
    """Width inside; 0: 8/3 of the model's."""


@frozen(kw_only=True)
class Rope:
    """Rotary positions: a table that is no component."""

    base: float = field(default=10000.0, validator=gt(0))
    scaling: Literal["none", "linear", "yarn"] = "none"


@frozen(kw_only=True)
class Transformer(ModelComponent):
    """A decoder-only transformer."""

    dim: int = field(validator=gt(0))
    """Width of the model."""
    layers: int = field(validator=gt(0))
    heads: int = field(default=4, validator=gt(0))
    """Attention heads; must divide `dim`."""
    dropout: float = field(default=0.0, validator=[ge(0), lt(1)])
    rope: Rope = Rope()
    ffn: FFNComponent = default_type("swiglu")
    """What follows attention in each block."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if self.dim % self.heads:
            yield Problem("heads", f"{self.heads} does not divide dim {self.dim}")


# --- other plugins ------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class TopK(RouterComponent):
    """The k experts with the highest score."""

    top_k: int = field(default=2, validator=gt(0))


@frozen(kw_only=True)
class MoE(FFNComponent):
    """Mixture of experts."""

    experts: int = field(validator=gt(0))
    router: RouterComponent = default_type("topk")


@frozen(kw_only=True)
class AdamW(OptimizerComponent):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    lr: float = field(default=3e-4, validator=gt(0))
    """Base rate, before the schedule."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""
    weight_decay: float | SchedulerComponent = 0.1
    """A number, or a schedule of it."""
    no_decay: tuple[str, ...] = ("norm", "bias")
    fused: bool = False


@frozen(kw_only=True)
class Muon(OptimizerComponent):
    """Orthogonalised momentum."""

    lr: float = field(default=0.02, validator=gt(0))
    momentum: float = field(default=0.95, validator=[ge(0), lt(1)])
    nesterov: bool = True


@frozen(kw_only=True)
class Lookahead(OptimizerComponent):
    """An optimizer around another."""

    inner: OptimizerComponent
    every: int = field(default=5, validator=gt(0))

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        raise ZeroDivisionError("division by zero")


@frozen(kw_only=True)
class Cosine(SchedulerComponent):
    """Half a cosine after a warm-up."""

    warmup_steps: int = field(default=0, validator=ge(0))
    final: float = field(default=0.1, validator=[ge(0)])

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if self.warmup_steps >= job.train.steps:
            message = f"{self.warmup_steps} leaves nothing of the {job.train.steps} steps; lower it"
            yield Problem("warmup_steps", message)


@frozen(kw_only=True)
class Text(DatasetComponent):
    """Text files."""

    path: str = field(validator=min_len(1))
    """A glob."""
    encoding: Literal["utf-8", "latin-1"] = "utf-8"

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if job.data.tokenizer is None:
            yield Problem("", "text needs a tokenizer; add [data.tokenizer]")


@frozen(kw_only=True)
class Bytes(TokenizerComponent):
    """One token a byte."""


@frozen(kw_only=True)
class BPE(TokenizerComponent):
    """Byte-pair encoding, trained on the corpus."""

    vocab_size: int = field(default=4096, validator=gt(256))


@frozen(kw_only=True)
class FSDP(ParallelComponent):
    """Sharded parameters."""

    owns_reduction: ClassVar[bool] = True
    degree: int | Literal["auto"] = "auto"
    modules: str = "*"

    def degrees(self) -> Mapping[str, int | str]:
        return {"shard": self.degree}


@frozen(kw_only=True)
class TensorParallel(ParallelComponent):
    """Split matrices."""

    degree: int = field(default=2, validator=gt(1))

    def degrees(self) -> Mapping[str, int | str]:
        return {"tp": self.degree}


@frozen(kw_only=True)
class TensorBoard(LoggerComponent):
    """TensorBoard event files."""

    folder: Path = Path("tensorboard")
    tags: Mapping[str, str] = field(factory=dict)


@define(kw_only=True, slots=False)
class GradHistogram(TrainingHook):
    """Distribution of the gradients."""

    every: int = field(default=100, validator=gt(0))
    name: str = field(default="grad", validator=matches_re("[a-z_]+"))
    seen: int = field(default=0, init=False)


@define(kw_only=True, slots=False)
class Careful(Plugin):
    """Insists on clipping."""

    limit: float = 1.0

    @hookimpl
    def forge_validate_job(self, job: Job) -> Iterable[Problem]:
        if job.train.grad_clip_norm == 0 or job.train.grad_clip_norm > self.limit:
            yield Problem("train.grad_clip_norm", f"must be in (0, {self.limit}] with [plugins.careful]")


@define(kw_only=True, slots=False)
class Clumsy(Plugin):
    """Implements a hook that does not exist."""

    @hookimpl
    def forge_build_modle(self) -> None:
        raise NotImplementedError


KINDS = (
    ModelComponent,
    RouterComponent,
    OptimizerComponent,
    PackingComponent,
    LoaderComponent,
    SchedulerComponent,
    LossComponent,
    DatasetComponent,
    TokenizerComponent,
    ParallelComponent,
    ExecutorComponent,
    EvaluationComponent,
    StorageComponent,
    LoggerComponent,
    TrainingHook,
    Plugin,
)
CORE = {
    "scheduler": {"constant": Constant},
    "loss": {"cross_entropy": CrossEntropy},
    "executor": {"plain": Plain},
    "evaluation": {"held_out": HeldOut},
    "storage": {"local": Local},
    "packing": {"concatenate": Concatenate},
    "loader": {"plain": Thread},
    "logger": {"console": Console, "jsonl": JsonLines},
    "parallel": {"replicate": Replicate},
}
PLUGINS: dict[str, dict[str, dict[str, Any]]] = {
    "forge-plugin-transformer": {
        "kind": {"ffn": FFNComponent},
        "model": {"transformer": Transformer},
        "ffn": {"swiglu": SwiGLU},
    },
    "forge-plugin-moe": {"ffn": {"moe": MoE}, "router": {"topk": TopK}},
    "forge-plugin-checkpoints": {"kind": {"load": LoadComponent}, "load": {"parts": Parts}},
    "forge-plugin-adamw": {"optimizer": {"adamw": AdamW}},
    "forge-plugin-muon": {"optimizer": {"muon": Muon}},
    "forge-plugin-lookahead": {"optimizer": {"lookahead": Lookahead}},
    "forge-plugin-schedules": {"scheduler": {"cosine": Cosine}},
    "forge-plugin-text": {"dataset": {"text": Text}, "tokenizer": {"bytes": Bytes, "bpe": BPE}},
    "forge-plugin-fsdp": {"parallel": {"fsdp": FSDP}},
    "forge-plugin-tp": {"parallel": {"tp": TensorParallel}},
    "forge-plugin-tensorboard": {"logger": {"tensorboard": TensorBoard}},
    "forge-plugin-hooks": {"hook": {"grad_histogram": GradHistogram}},
    "forge-plugin-careful": {"plugin": {"careful": Careful, "clumsy": Clumsy}},
    # Two that claim one type, one that is no scheduler, and one that is not for this core.
    "forge-plugin-lion": {"optimizer": {"lion": AdamW}},
    "forge-plugin-lion-fast": {"optimizer": {"lion": Muon}},
    "forge-plugin-odd": {"scheduler": {"odd": AdamW}},
    "forge-plugin-soap": {"optimizer": {"soap": AdamW}},
}
REQUIRES = {"forge-plugin-soap": ("forge-run>=2.0,<3",)}


def make_catalog() -> Catalog:
    """Everything above, as if each distribution were installed."""
    core = Distribution("forge-run", "0.1.0")
    offers = [_offer("kind", base.kind, base, core) for base in KINDS]
    offers += [_offer(kind, type_, cls, core) for kind, types in CORE.items() for type_, cls in types.items()]
    for name, kinds in PLUGINS.items():
        distribution = Distribution(name, "0.2.0", REQUIRES.get(name, ()))
        for kind, types in kinds.items():
            offers += [_offer(kind, type_, cls, distribution) for type_, cls in types.items()]
    offers.append(Offer("command", "check", "forge_kit.tools.check:command", Distribution("forge-kit", "0.1.0")))
    author = Distribution("forge-plugin-author", "0.1.0")
    offers.append(Offer("command", "new-plugin", "forge_plugin_author.new_plugin:command", author))
    offers.append(Offer("command", "plugins", "forge_plugin_author.plugins:command", author))
    offers.append(Offer("command", "explain", "forge_plugin_author.explain:command", author))
    broken = Distribution("forge-plugin-sophia", "0.1.0")
    offers.append(Offer("optimizer", "sophia", "forge_plugin_sophia:Sophia", broken))
    return Catalog(offers)


def _offer(kind: str, type_: str, cls: type, distribution: Distribution) -> Offer:
    return Offer(kind, type_, f"{cls.__module__}:{cls.__qualname__}", distribution, cls)
