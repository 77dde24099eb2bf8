"""A whole model's loss and gradients on the device, against float64 on the CPU."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from forge_core.engine.build import Run
from gpu.bench import Bench, piece, relative_error
from gpu.runs import Steps, copy_weights, decoder, experts, load, merged, steps_of

LIMITS = {"fp64": 1e-9, "fp32": 2e-4, "bf16": 6e-2}
"""Of the gradient's error, by precision. A bf16 product is within 4e-3 of the exact one, and layers add up."""

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "layernorm, gelu, tied": {
        "model": {"norm": {"type": "layernorm"}, "ffn": {"type": "gelu"}, "tie_embeddings": True}
    },
    "plain loss": {"loss": {"type": "cross_entropy"}},
    "smoothing, z-loss": {"loss": {"type": "chunked_cross_entropy", "label_smoothing": 0.1, "z_loss": 1e-3}},
    "recomputed": {"parallel": {"activation_checkpointing": {}}},
    "multi-token": {"model": {"mtp": {}}},
    "like Gemma": {
        "model": {
            "norm_placement": "both",
            "norm": {"offset": 1},
            "ffn": {"type": "geglu"},
            "tie_embeddings": True,
            "embedding_scale": 16.0,
            "logit_soft_cap": 30.0,
            "attention": {"qk_norm_offset": 1},
        }
    },
    "like OLMo, learned positions": {
        "model": {"norm_placement": "post", "attention": {"qk_norm": "all"}, "learned_positions": 512}
    },
    "8 experts": {"model": {"ffn": experts(8, 2, 64)}},
}


@piece("numerics", "loss and gradients against the CPU in float64; packed documents against each by itself")
def numerics(bench: Bench) -> None:
    for name, changes in MODELS.items():
        with bench.case(name):
            _compare(bench, name, changes)
    for precision in ("fp32", "bf16"):
        with bench.case(f"packed, {precision}"):
            _packed(bench, precision)


def _job(bench: Bench, precision: str, device: str, changes: dict[str, Any]) -> Any:
    sizes = {"dim": bench.size(256, 64), "layers": bench.size(4, 2), "vocab_size": 512}
    heads = {"heads": 4, "kv_heads": 2, "qk_norm": True}
    train = {"precision": precision, "device": device, "seq_len": bench.size(512, 64), "float32_matmul": "highest"}
    sections = decoder(bench, model={**sizes, "attention": heads}, train=train)
    sections["data"]["sources"][0]["vocab_size"] = 512
    if "ffn" not in changes.get("model", {}):
        sections["model"]["ffn"] = {"hidden": bench.size(512, 128)}
    return load(bench, merged(sections, changes))


def _compare(bench: Bench, name: str, changes: dict[str, Any]) -> None:
    with steps_of(_job(bench, "fp64", "cpu", changes)) as reference:
        expected_loss, expected = _gradients(reference)
        for precision, limit in LIMITS.items():
            if precision == "fp64" and "experts" in name:
                continue  # near ties between experts are decided by the last bit
            with steps_of(_job(bench, precision, bench.device.type, changes)) as steps:
                copy_weights(reference.run, steps.run)
                loss, found = _gradients(steps)
            error = abs(loss - expected_loss) / expected_loss
            wider = 3 if "experts" in name else 1
            cells = {"model": name, "precision": precision, "loss_error": error}
            bench.within(
                "gradients against float64 on the CPU", relative_error(found, expected), wider * limit, **cells
            )


def _gradients(steps: Steps) -> tuple[float, Tensor]:
    """The loss of the first step, and all gradients as one vector."""
    _, sums = steps.stepper.gradients(steps.loader.next_step(), 0)
    parts = [item.parameter.grad.detach().cpu().double().flatten() for item in steps.run.parameters]
    return float(sums["loss_sum"] / sums["count"]), torch.cat(parts)


# --- packed documents --------------------------------------------------------------------------------------------


def _packed(bench: Bench, precision: str) -> None:
    """Documents that share a row, in every way that keeps them apart there, against each in a row of its own."""
    from forge_plugin_transformer.document_backends import DocumentChoice, able

    job = _job(bench, precision, bench.device.type, {})
    with steps_of(job) as steps:
        run = steps.run
        ways = able(bench.device.type, str(run.context.dtype).removeprefix("torch."), "torch")
        batch, bounds = _documents(job.train.seq_len, bench.device)
        apart = torch.cat([_hidden(run, _row(batch, *pair)) for pair in bounds], 1)
        for way in ways:
            for layer in run.model.layers.values():
                core: Any = layer.attention.core
                core.documents = attrs.evolve(core.documents, way=way) if core.documents else DocumentChoice(way, "")
            error = relative_error(_hidden(run, batch), apart)
            cells = {"way": way, "precision": precision}
            bench.within(
                "packed documents against each by itself", error, {"fp32": 1e-4, "bf16": 3e-2}[precision], **cells
            )


def _documents(length: int, device: torch.device) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """A row of four documents of unequal lengths."""
    ends = [length // 8, length // 2, length // 2 + 1, length]
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    ids = torch.cat([torch.full((stop - start,), number) for number, (start, stop) in enumerate(bounds)])
    positions = torch.cat([torch.arange(stop - start) for start, stop in bounds])
    tokens = torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "document_ids": ids, "positions": positions}
    return {name: tensor[None].to(device) for name, tensor in batch.items()}, bounds


def _row(batch: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {"input_ids": batch["input_ids"][:, start:stop]}


@torch.no_grad()
def _hidden(run: Run, batch: dict[str, Tensor]) -> Tensor:
    return run.model(batch)
