"""Jobs made in Python: filling in what only a catalog knows."""

from __future__ import annotations

from typing import Any

import attrs

from forge_core.config.job import ALWAYS, Job
from forge_core.config.structure import complete_value
from forge_core.contracts.components import DefaultType
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import CORE, Catalog


def complete(job: Job, catalog: Catalog | None = None) -> Job:
    """The job with every `default_type` replaced by its component, and the core's own loggers and evaluation added.

    `load_job` does this by itself. Cross-field rules are `forge_core.config.rules.check_rules`.

    Raises:
        JobError: default components are not installed; names each one's path.
    """
    if job.checked:  # from a file: it has been completed
        return job
    completed, problems = complete_value(_with_always(job), catalog or Catalog.installed())
    if problems:
        raise JobError(problems)
    return completed


def _with_always(job: Job) -> Job:
    tables: dict[str, Any] = {}
    for section, names in ALWAYS.items():
        tables[section] = {name: DefaultType(f"{CORE}/{name}") for name in names} | dict(getattr(job, section))
    return attrs.evolve(job, **tables)
