"""What plugin authors and our own tests need to try a component: a tiny model, tiny data, a job around them."""

from forge_core.testing.documents import ListedDocuments, RandomDocuments
from forge_core.testing.tiny import Numbers, PenalisedModel, TinyAdamW, TinyModel, tiny_job

__all__ = ["ListedDocuments", "Numbers", "PenalisedModel", "RandomDocuments", "TinyAdamW", "TinyModel", "tiny_job"]
