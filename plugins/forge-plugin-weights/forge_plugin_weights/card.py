"""The model card of an export: what it is, what it was made of, and how it was trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_core.config.load import to_toml
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog

CARD = "README.md"


def write_card(
    folder: Path,
    job: Job,
    catalog: Catalog,
    *,
    architecture: str,
    shapes: Mapping[str, Sequence[int]],
    dtype: str,
    step: int,
    tokens: int | None,
    evaluation: Mapping[str, Any],
    origin: Mapping[str, Any],
) -> None:
    """Write the card, unless there is one, as where the tokenizer's files have brought it.

    Args:
        folder: of the export.
        job: of the run.
        catalog: by which types are named.
        architecture: name of the class in `transformers`.
        shapes: of the model's tensors.
        dtype: of most of them.
        step: of the weights.
        tokens: positions that it was trained on; None if that is not known.
        evaluation: the last one that the checkpoint records.
        origin: what the run's model was imported from; empty for others.
    """
    # One that came with the model's files is the publisher's.
    if (folder / CARD).exists():
        return
    rows = [
        ("class", f"`{architecture}`"),
        ("parameters", f"{sum(math.prod(shape) for shape in shapes.values()):,}, in {dtype}"),
        *(_origin_rows(origin) if origin else ()),
        *(_training_rows(job, catalog, step, tokens) if step else ()),
        *_evaluation_rows(evaluation),
    ]
    hub = origin.get("hub") or {}
    base = f"base_model: {hub['name']}\n" if hub else ""  # by which the hub shows where a model is from
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    trained = "further trained" if origin and step else "trained" if step else "imported, and not trained further,"
    text = f"""---
library_name: transformers
{base}---

# {job.job.name}

A model {trained} with Forge.

| | |
|---|---|
{table}

`forge/job.toml` is the whole job, `forge/provenance.json` has the checkpoint's SHA-256 and the versions of what trained
it, `forge/parity.json` how these files, read back, differ from its weights.
"""
    (folder / CARD).write_text(text)


def _origin_rows(origin: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    hub = origin.get("hub") or {}
    name = f"{hub['name']} at {hub['commit']}" if hub else Path(origin["folder"]).name
    yield "base model", f"{name} (`{origin['model_type']}`)"
    for name, digest in origin["files"].items():
        yield f"SHA-256 of its {name}", f"`{digest}`"


def _training_rows(job: Job, catalog: Catalog, step: int, tokens: int | None) -> Iterable[tuple[str, str]]:
    train, optimizer = job.train, to_toml(job.optimizer, catalog)
    largest = "at most " if train.batch_schedule else ""
    yield "steps", f"{step:,} of {train.steps:,}, {largest}{train.global_batch_size} sequences of {train.seq_len} each"
    if tokens is not None:
        yield "tokens", f"{tokens:,}"
    # Not every optimizer has this key.
    rate = f", learning rate {optimizer['lr']:g}" if isinstance(optimizer.get("lr"), float) else ""
    yield "optimizer", f"`{optimizer['type']}`{rate}"
    for source in job.data.sources:
        yield "data", f"`{catalog.type_of(type(source))}`"


def _evaluation_rows(evaluation: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in evaluation.get("metrics", {}).items():
        if isinstance(value, float):
            yield f"{name}, at step {evaluation.get('step')}", f"{value:.4g}"
