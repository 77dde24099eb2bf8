"""The key `extra` of a cluster: keys of a TrainJob's spec that no other key sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kubeflow_trainer_api import models

from forge_plugin_kubeflow.documents import problem_of
from forge_plugin_launch.remote.secret_values import is_secret, known_token, texts

PLACES = {
    ("runtimeRef",): "runtime",
    ("suspend",): "",
    ("trainer", "image"): "image",
    ("trainer", "command"): "",
    ("trainer", "args"): "",
    ("trainer", "numNodes"): "nodes",
    ("trainer", "numProcPerNode"): "tasks_per_node",
}
"""Keys that are set already, each with the key that sets it; empty: none does."""


def refuse_wrong(extra: Mapping[str, Any]) -> None:
    """Raises a `ValueError` for keys that TrainJobs do not have, values of other types, secrets, and keys of ours."""
    for place, key in PLACES.items():
        if _at(extra, place) is not None:
            instead = f"is the key {key}" if key else "belongs to forge-run submit, which sets it itself"
            raise ValueError(f"'extra' has {'.'.join(place)}, which {instead}")
    # Required by the class, and ours
    spec = {"runtimeRef": {"name": "any"}, **extra}
    if problem := problem_of(spec, models.TrainerV1alpha1TrainJobSpec):
        raise ValueError(f"'extra' is no part of a TrainJob's spec: {problem}")
    for path, value in texts(extra, "extra"):
        if known_token(value):
            raise ValueError(f"'extra' has a value at {path} that looks like a secret; use the key secrets")
    for variable in _at(extra, ("trainer", "env")) or []:
        if is_secret(variable.get("name", ""), variable.get("value") or ""):
            raise ValueError(
                f"'extra' has a value for {variable['name']} that looks like a secret; use the key secrets"
            )


def _at(table: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        table = table.get(key) if isinstance(table, Mapping) else None
    return table
