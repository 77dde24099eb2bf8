"""Tiny models, tiny data and jobs around them, to try a component with."""

from forge_testing.documents import ListedDocuments, RandomDocuments, Sentences
from forge_testing.router_model import RoutedModel
from forge_testing.tiny import (
    TINY_JOB,
    Numbers,
    PatchModel,
    PatchNumbers,
    PenalisedModel,
    SplittableModel,
    TinyAdamW,
    TinyModel,
    job_problems,
    tiny_job,
)

__all__ = [
    "TINY_JOB",
    "ListedDocuments",
    "Numbers",
    "PatchModel",
    "PatchNumbers",
    "PenalisedModel",
    "RandomDocuments",
    "RoutedModel",
    "Sentences",
    "SplittableModel",
    "TinyAdamW",
    "TinyModel",
    "job_problems",
    "tiny_job",
]
