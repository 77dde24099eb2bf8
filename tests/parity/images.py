"""The table of layouts for vision-language models: every fusion, rows of text among those with images and videos.

python tests/parity/table.py --images
"""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen
from layouts import (
    CAPTURED,
    FSDP_ALL_REDUCE,
    FSDP_SCATTER,
    NORM,
    SUM,
    TP_COMPLETION,
    Row,
    cp,
    ep,
    pp,
    runs_here,
    tp,
)

from forge_core.contracts.components import ModelComponent
from forge_core.job import Job
from forge_core.parallel.stages import Replicate
from forge_plugin_cross_attention import CrossAttention
from forge_plugin_moe import MoE
from forge_plugin_mot import MixtureOfTransformers
from forge_plugin_parallel import FSDP, ActivationCheckpointing, PipelineParallel
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_plugin_vision import Joint, VisionLanguage
from forge_testing import tiny_job
from forge_testing.catalogs import installed
from forge_testing.vision import RandomImages, tiny_vision

SEQ_LEN = 24

FUSIONS = {
    "joint": Joint(),
    "bidirectional": Joint(bidirectional=True),
    "cross_attention": CrossAttention(
        gate_start=0.5, every=2, heads=4, kv_heads=2, ffn=SwiGLU(hidden=24), qk_norm=True
    ),
    "mot": MixtureOfTransformers(),
    "moma": Joint(),
}


@frozen(kw_only=True)
class ImageRow(Row):
    """A layout of a vision-language model."""

    fusion: str
    """One of `FUSIONS`; `bidirectional` is `joint` with that key, `moma` is `joint` with experts of each modality."""
    image_every: int = 0
    """Only every so many-th sequence has images; 0: two of three have some."""

    @property
    def id(self) -> str:
        """What it is called among tests: layouts occur with several fusions."""
        return f"{self.name}, {self.fusion}"

    @property
    def has_videos(self) -> bool:
        """Whether sequences have videos beside images: not where experts are those of images alone."""
        return self.fusion != "moma"

    @property
    def features(self) -> str:
        few = [f"images in one of {self.image_every} sequences"] if self.image_every else []
        more = ["videos"] * self.has_videos + few + ["accumulation"] * bool(self.micro_batch_size)
        return ", ".join([self.fusion, *more])

    def _language(self) -> ModelComponent:
        attention = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True)
        sizes: dict[str, Any] = {"vocab_size": 32, "dim": 16, "layers": self.layers}
        if self.fusion == "moma":
            from forge_plugin_moma import MoMa

            router = MoMa(experts={"text": 2, "image": 2}, top_k=1)
            sizes["ffn"] = MoE(experts=4, hidden=16, router=router)
        return Transformer(attention=attention, **sizes)

    def job(self, folder: str, parallel: bool = True, precision: str = "fp64", steps: int = 5) -> Job:
        """The row's job; without its stages, what it is compared with."""
        vision = evolve(tiny_vision(), patches_per_sequence=12 if self.has_videos else 8)
        model = VisionLanguage(language=self._language(), vision=vision, fusion=FUSIONS[self.fusion])
        videos = 2 if self.has_videos else 0  # every second image of a sequence is one
        source = RandomImages(held_out=5, has_entries=False, image_every=self.image_every, video_every=videos)
        settings: dict[str, Any] = {"model": model, "data": {"sources": (source,)}, "precision": precision}
        settings |= {"steps": steps, "global_batch_size": 8, "seq_len": SEQ_LEN, "grad_clip_norm": 0.5}
        if parallel:
            settings |= {"parallel": dict(self.stages), "micro_batch_size": self.micro_batch_size}
        return tiny_job(folder, installed(), **settings)


def row(name: str, ranks: int, fusion: str, stages: dict[str, Any], reduction: str, **more: Any) -> ImageRow:
    return ImageRow(name=name, ranks=ranks, fusion=fusion, stages=stages, reduction=reduction, **more)


FULL = ActivationCheckpointing()
FSDP2 = {"fsdp": FSDP()}
IMAGE_ROWS = [
    row("replicate2", 2, "joint", {"replicate": Replicate()}, SUM, micro_batch_size=2, thorough=True),
    # Of eight sequences at most one has an image, so at least one rank has none, and in some steps neither has.
    row("fsdp2", 2, "joint", FSDP2, FSDP_SCATTER, micro_batch_size=2, image_every=11),
    row("fsdp2, compiled, checkpointing", 2, "joint", {**FSDP2, "compile": CAPTURED, "activation_checkpointing": FULL},
        FSDP_SCATTER, thorough=True),
    row("tp2, compiled", 2, "bidirectional", {"tp": tp(), "compile": CAPTURED}, TP_COMPLETION, thorough=True),
    row("pp3, 1f1b", 3, "joint", {"pp": PipelineParallel(degree=3)}, NORM, layers=3, micro_batch_size=2, thorough=True),
    row("cp2, ring", 2, "moma", {"cp": cp("ring")}, SUM, micro_batch_size=4, thorough=True),
    row("cp2, ulysses", 2, "mot", {"cp": cp("ulysses")}, SUM, thorough=True),
    row("fsdp2/ep2", 2, "moma", {**FSDP2, "ep": ep()}, FSDP_SCATTER, micro_batch_size=2, image_every=5, thorough=True),
    row("hsdp 2x2", 4, "cross_attention", {"fsdp": FSDP(replicate=2)}, FSDP_ALL_REDUCE, micro_batch_size=1,
        image_every=11, thorough=True),
    row("fsdp2 x tp2", 4, "joint", {**FSDP2, "tp": tp()}, TP_COMPLETION, micro_batch_size=1, image_every=5,
        thorough=True),
    row("fsdp2 x pp2", 4, "joint", {**FSDP2, "pp": pp("1f1b")}, FSDP_SCATTER, micro_batch_size=1, image_every=5,
        thorough=True),
    row("fsdp2 x pp2, checkpointing", 4, "bidirectional",
        {**FSDP2, "pp": pp("1f1b"), "activation_checkpointing": FULL}, FSDP_SCATTER, micro_batch_size=2, image_every=5,
        thorough=True),
    row("fsdp2 x cp2", 4, "cross_attention", {**FSDP2, "cp": cp("ring")}, FSDP_SCATTER, image_every=11),
    row("tp2 x pp2", 4, "mot", {"tp": tp(), "pp": pp("1f1b")}, TP_COMPLETION, micro_batch_size=2),
    row("tp2 x cp2", 4, "cross_attention", {"tp": tp(), "cp": cp("all_gather")}, TP_COMPLETION, thorough=True),
    row("pp2 x cp2", 4, "joint", {"pp": pp("1f1b"), "cp": cp("ring")}, NORM, micro_batch_size=2, thorough=True),
    row("fsdp4/ep2, checkpointing", 4, "moma", {**FSDP2, "ep": ep(), "activation_checkpointing": FULL}, FSDP_SCATTER,
        micro_batch_size=1, thorough=True),
]  # fmt: skip
IMAGE_ROWS = [each for each in IMAGE_ROWS if runs_here(each.stages)]
