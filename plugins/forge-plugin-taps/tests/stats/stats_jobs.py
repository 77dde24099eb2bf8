"""Jobs whose steps are sampled, and what they log."""

from __future__ import annotations

from forge_core import Trainer
from forge_plugin_taps.stats import TrainingStats
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.outcomes import metrics_of

MODEL = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=2, qk_norm=True))
SIZES = {"steps": 4, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp64"}


def job(folder, hook=None, catalog=None, **changes):
    tables = {"model": MODEL, "data": {"sources": (Numbers(ignored=1),)}, "checkpoint": {"interval": 0}}
    changes = {**tables, **SIZES, **changes}
    return tiny_job(str(folder), catalog, hooks={"training_stats": hook} if hook else {}, **changes)


def lines(made, *hooks):
    """The numbers of this distribution in the line of each step."""
    summary = Trainer(made, hooks=list(hooks), echo=lambda text: None).run()
    records = [record for record in metrics_of(summary) if "loss" in record]
    return {record["step"]: {k: v for k, v in record.items() if k.startswith("stats/")} for record in records}


def stats(**settings):
    return TrainingStats(**{"interval": 2, **settings})
