"""Sizes for training that starts from an imported model."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from attrs import evolve

from forge_core.config.load import load_job
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_plugin_plan.init.corpora import Corpus
from forge_plugin_plan.init.sizes import TUNING_EPOCHS, Budget, Data, Machine, Sizes, plan, token_estimate

START = "start.toml"
SEQ_LEN = 1024
UNKNOWN = 10_000_000
"""Tokens of a run where neither time nor data bound it."""


def start_file(run: str) -> str:
    """Returns the path of the tables that an import has written.

    Raises:
        JobError: the folder has none.
    """
    path = Path(run) / START
    if not path.is_file():
        message = f"--from {run}: there is no {START} in it; make it with `forge-run weights import MODEL --out {run}`"
        raise JobError(f"{message}, or start from a run of your own with [checkpoint.load] path = {str(run)!r}")
    return str(path)


def tuning_sizes(start: str, corpus: Corpus, budget: Budget, machine: Machine, catalog: Catalog) -> tuple[Sizes, int]:
    """Choose batch and steps for a model that exists; returns them, and its vocabulary.

    Raises:
        JobError: `start` or the data are not right, or the model does not fit into memory.
    """
    count, layers, dim, vocab_size = _model(start, corpus, catalog)
    tokens = token_estimate(corpus.text_bytes, vocab_size)
    wanted = float(TUNING_EPOCHS * tokens if tokens else UNKNOWN)
    data = Data(tokens=tokens, vocab_size=vocab_size)
    return plan(count, layers, dim, budget, machine, data, seq_len=SEQ_LEN, wanted=wanted), vocab_size


def _model(start: str, corpus: Corpus, catalog: Catalog) -> tuple[int, int, int, int]:
    """Returns parameters, blocks, width and vocabulary of the model, which is built without memory."""
    import torch

    from forge_core.contracts.layout import Layout
    from forge_core.engine.build import build_bare_model, build_tokenizer
    from forge_core.parallel.initialise import bare_context
    from forge_plugin_plan.init.job_text import source_table

    # Keys that every job must have; none of them changes the size of the model
    rest = '[train]\nsteps = 1\nglobal_batch_size = 1\nseq_len = 8\n[optimizer]\ntype = "adamw"\n'
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder, "draft.toml")
        draft.write_text(rest + source_table(corpus), encoding="utf-8")
        job = load_job(start, draft, catalog=catalog, world_size=1)
    context = bare_context(job, Layout(), catalog, torch.device("cpu"))
    # Before the model, whose vocabulary may follow from the tokenizer
    tokenizer = build_tokenizer(job, context)
    model, outline = build_bare_model(job, evolve(context, tokenizer=tokenizer))
    count = sum(outline.sizes.values())
    layers = len(getattr(model, "layers", ())) or 1
    # Without a key `dim`: a block has about 12 dim^2 parameters
    dim = int(getattr(job.model, "dim", 0)) or round(math.sqrt(count / layers / 12))
    return count, layers, dim, tokenizer.vocab_size if tokenizer else int(getattr(job.model, "vocab_size", 0))
