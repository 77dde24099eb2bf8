"""Parses tasks by SkyPilot itself: python vendor_parser.py FILE…, with the Python of an environment that has SkyPilot.

Prints what SkyPilot makes of each, as a line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import yaml


def parsed(path: str) -> dict[str, object]:
    """Returns what SkyPilot has understood of a task, or its error."""
    # By name: SkyPilot is no requirement of these tests, which run this file in another environment
    sky = importlib.import_module("sky")

    try:
        task = sky.Task.from_yaml_config(yaml.safe_load(Path(path).read_text()))
    except ValueError as error:
        return {"error": str(error)}
    resources = [*task.resources]
    return {
        "name": task.name,
        "nodes": task.num_nodes,
        "accelerators": [each.accelerators for each in resources],
        "spot": [each.use_spot for each in resources],
        "recovery": resources[0].job_recovery,
        "run": task.run,
        "secrets": [each.name for each in task._managed_secret_refs],
        "mounts": {path: storage.mode.value for path, storage in task.storage_mounts.items()},
    }


if __name__ == "__main__":
    print("\n".join(json.dumps(parsed(path)) for path in sys.argv[1:]))
