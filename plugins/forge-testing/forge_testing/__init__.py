"""What plugin authors and our own tests need to try a component: a tiny model, tiny data, a job around them."""

from forge_testing.documents import ListedDocuments, RandomDocuments, Sentences
from forge_testing.routed import RoutedModel
from forge_testing.tiny import (
    TINY_JOB,
    Numbers,
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
