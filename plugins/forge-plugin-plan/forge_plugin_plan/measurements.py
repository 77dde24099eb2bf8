"""What a machine did when it was measured: the schema of `calibration.json`, and its file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen
from attrs.validators import ge, gt, instance_of

from forge_core.contracts.errors import JobError
from forge_core.contracts.layout import Layout
from forge_core.files import write_atomically
from forge_core.job import Job

FILE = "calibration.json"
"""In the run folder."""
SCHEMA = 1


@frozen(kw_only=True)
class Product:
    """Products of two square matrices."""

    dtype: str = field(validator=instance_of(str))
    size: int = field(validator=gt(0))
    flops: float = field(validator=gt(0))
    """FLOP/s."""


@frozen(kw_only=True)
class Collective:
    """A collective of a group of ranks."""

    kind: str = field(validator=instance_of(str))
    """`all-reduce`, `all-gather` or `reduce-scatter`."""
    ranks: int = field(validator=gt(1))
    per_node: int = field(validator=gt(0))
    """Ranks that share a node, on the node that has fewest."""
    bytes: int = field(validator=gt(0))
    """Of the whole tensor."""
    seconds: float = field(validator=gt(0))


@frozen(kw_only=True)
class Step:
    """Steps of a run."""

    seconds: float = field(validator=gt(0))
    """Mean, without evaluations and checkpoints."""
    steps: int = field(validator=gt(0))
    """Number of steps that were timed."""
    job: str = field(validator=instance_of(str))
    """See `fingerprint`."""


@frozen(kw_only=True)
class Measurements:
    """A machine, and a run on it."""

    device: str = field(validator=instance_of(str))
    memory: int = field(validator=ge(0))
    """Bytes of the device; 0: unknown."""
    torch: str = field(validator=instance_of(str))
    bandwidth: float = field(validator=gt(0))
    """Bytes a second between memory and processors, read and written."""
    launch: float = field(validator=gt(0))
    """Seconds that the host takes to start an operation."""
    products: Sequence[Product]
    collectives: Sequence[Collective] = ()
    step: Step | None = None

    def product(self, dtype: str) -> Product | None:
        """Returns the fastest products of a dtype, as `bfloat16`."""
        return max((each for each in self.products if each.dtype == dtype), key=lambda each: each.flops, default=None)

    def write(self, path: Path) -> None:
        """Write the file."""
        write_atomically(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Measurements:
        """Returns the measurements of a file.

        Raises:
            JobError: it cannot be read, or is none of this schema.
        """
        try:
            facts = json.loads(path.read_text())
            if facts.pop("schema") != SCHEMA:
                raise ValueError(f"`schema` must be {SCHEMA}")
            parts: dict[str, Any] = {
                "products": [Product(**each) for each in facts.pop("products")],
                "collectives": [Collective(**each) for each in facts.pop("collectives")],
            }
            step = facts.pop("step")
            return cls(**facts, **parts, step=Step(**step) if step else None)
        except OSError as error:
            raise JobError(f"--calibrate {path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"`{error.args[0]}` is missing" if isinstance(error, KeyError) else error.args[0]
            raise JobError(f"--calibrate {path}: is no {FILE} that a run has written: {what}") from error


def fingerprint(job: Job, layout: Layout) -> str:
    """Returns a digest of what the time of a step depends on: model, batch, precision, stages and optimizer."""
    train = job.train
    # Not steps, rates and data, on which no time depends; components by their `repr`, which has all of their keys
    facts = (train.global_batch_size, train.micro_batch_size, train.seq_len, train.precision, str(layout))
    parts = (job.model, job.loss, job.optimizer, sorted(job.parallel.items()))
    return hashlib.sha256(repr((facts, parts)).encode()).hexdigest()[:16]


def seconds_of(points: Sequence[Collective], size: int) -> float:
    """Returns the time of a collective of `size` bytes, between measured ones, or in proportion beyond the largest."""
    ordered = sorted(points, key=lambda point: point.bytes)
    for smaller, larger in pairwise(ordered):
        if size <= larger.bytes:
            share = max(0.0, (size - smaller.bytes) / (larger.bytes - smaller.bytes))
            return smaller.seconds + share * (larger.seconds - smaller.seconds)
    return ordered[-1].seconds * max(1.0, size / ordered[-1].bytes)
