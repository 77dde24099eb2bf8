"""The schema of a task by SkyPilot itself: python vendor_schema.py, in an environment that has SkyPilot.

Prints what `forge_plugin_skypilot/task.schema.json` has. SkyPilot cannot be in Forge's own environment (its pins of
click and uvicorn exclude huggingface_hub and wandb), so that this file imports nothing else.
"""

from __future__ import annotations

import importlib
import json
import re
from typing import Any


def schema() -> dict[str, Any]:
    """Returns SkyPilot's schemas of a task, its resources and its storage as one document of JSON Schema."""
    # By name: SkyPilot is no requirement of these tests, which run this file in another environment
    sky, schemas = importlib.import_module("sky"), importlib.import_module("sky.utils.schemas")

    # As strict as the API server, which knows all properties of plugins
    schemas._allow_additional_properties = lambda: False
    task = schemas.get_task_schema()
    task["properties"]["resources"] = schemas.get_resources_schema()
    # A path or URL that is copied, or a storage
    task["properties"]["file_mounts"] = {
        "type": "object",
        "additionalProperties": {"anyOf": [{"type": "string"}, schemas.get_storage_schema()]},
    }
    about = {"title": f"Task of SkyPilot {sky.__version__}", "$comment": "From SkyPilot (Apache License 2.0)"}
    return {**about, "$schema": "https://json-schema.org/draft/2020-12/schema", **_standard(task)}


def _standard(value: Any) -> Any:
    """A schema without SkyPilot's own keyword, by a pattern that says the same, and without dialects of its parts."""
    if isinstance(value, list):
        return [_standard(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: _standard(item) for key, item in value.items() if key not in ("case_insensitive_enum", "$schema")}
    if names := value.get("case_insensitive_enum"):
        made["pattern"] = f"^(?i:{'|'.join(re.escape(name) for name in names)})$"
    return made


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
