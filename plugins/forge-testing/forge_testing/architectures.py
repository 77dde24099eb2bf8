"""For authors of architectures: a model of `transformers` with random weights goes in, and comes out the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from forge_core.checkpoint.resume import locate
from forge_core.config.load import parse_job
from forge_core.engine.build import build_context, build_model
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.checkpoints import load_model
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.files import Place, places_in
from forge_plugin_weights.importing import import_folder

NOISE = 0.1
"""Standard deviation of the noise on each weight, norms and biases too, so that exchanged ones are noticed."""


def check_architecture(
    architecture: str, config: Any, folder: Path, *, length: int = 24, tolerance: float = 1e-4
) -> None:
    """Check an architecture by a random model: import, logits, export of every tensor, and loading the export.

    Args:
        architecture: its name, or the place of its class, such as `./mine.py:Mine`.
        config: a configuration of `transformers`, of a small model.
        folder: an empty one, for the files.
        length: of the two sequences that are computed; longer than a window, so that it has an effect.
        tolerance: of logits, between implementations in float32.

    Raises:
        AssertionError: something differs; names it.
        JobError: the configuration or the tensors are not of the architecture; names the key or tensor.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    theirs = _with_noise(auto.from_config(config, dtype=torch.float32))
    theirs.save_pretrained(published := folder / "published")
    ids = torch.randint(0, theirs.config.vocab_size, (2, length))
    expected = _logits(theirs, ids)

    run = import_folder(published, folder / "run", tokenizer=False, architecture=architecture)
    difference = (_logits_of_run(run, ids) - expected).abs().max().item()
    assert difference <= tolerance, f"logits differ by {difference:.3g}, at a largest of {expected.abs().max():.3g}"

    exported = export_run(run, folder / "exported")
    before, after = places_in(published), places_in(exported)
    assert before.keys() == after.keys(), f"in one of the folders only: {sorted(before.keys() ^ after.keys())}"
    different = [name for name, place in before.items() if not _equal(place, after[name])]
    assert not different, f"other values after the export: {different}"

    loaded, loading = auto.from_pretrained(exported, output_loading_info=True)
    amiss = {what: names for what, names in loading.items() if names}
    assert not amiss, f"transformers loads the export with {amiss}"
    assert type(loaded) is type(theirs), f"the export is a {type(loaded).__name__}, and not a {type(theirs).__name__}"
    # To the bit: one class computes with equal weights
    assert torch.equal(_logits(loaded.eval(), ids), expected), "config.json of the export is of another model"


@torch.no_grad()
def _with_noise(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    return model.eval()


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids).logits
    return logits


@torch.no_grad()
def _logits_of_run(run: Path, ids: Tensor) -> Tensor:
    catalog = Catalog.installed()
    checkpoint, manifest = locate(run, "full")
    job = parse_job(manifest["job"], "manifest.json", catalog)
    # As the other model, whatever precision the import has put into the job
    job = attrs.evolve(job, train=attrs.evolve(job.train, precision="fp32"))
    model: Any = build_model(job, build_context(job, catalog, run)).model
    load_model(checkpoint, model)
    logits: Tensor = model.eval().head.logits(model({"input_ids": ids}))
    return logits


def _equal(one: Place, other: Place) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.equals(other)
