"""What commands print with `--json` in any test is compared with the schemas that they publish.

Published schemas allow further keys, which a later version may have. Here they do not: a key that is printed and not
published fails the test in which it is printed. Commands in other processes are not compared.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Mapping
from types import FrameType, ModuleType
from typing import Any

import jsonschema

from forge_core.plugins.catalog import Catalog
from forge_kit.tools import json_output
from forge_kit.tools.output_schema import OUTPUTS, outputs_of


def install() -> None:
    """Compare from now on."""
    original = json_output.json_text

    def json_text(facts: Any, indent: int = 2) -> str:
        text = original(facts, indent)
        caller = sys._getframe(1)
        if caller.f_code is json_output.print_json.__code__:
            compare(caller, text)
        return text

    json_output.json_text = json_text


def compare(frame: FrameType | None, text: str) -> None:
    """Compare what is printed with the schema of the command in whose function a frame is; tests have others, too."""
    while frame is not None and not (name := commands().get(_place(frame))):
        frame = frame.f_back
    if frame is None:
        return
    module = sys.modules[frame.f_globals["__name__"]]
    schemas = outputs_of(module)
    # Of several commands in one module its name, then an action; neither: the command's own
    words = [name.rpartition(" ")[2], *frame.f_locals["argv"], ""]
    action = next(word for word in words if word in schemas)
    error = jsonschema.exceptions.best_match(validator(module, action).iter_errors(json.loads(text)))
    assert error is None, (
        f"{module.__name__} publishes another schema, in {OUTPUTS}(): {error.json_path}: {error.message}"
    )


def _place(frame: FrameType) -> str:
    return f"{frame.f_globals['__name__']}:{frame.f_code.co_name}"


@functools.cache
def commands() -> Mapping[str, str]:
    """Names of our commands by their functions."""
    offers = Catalog.installed().offers("command")
    return {offer.value: offer.type for offer in offers if offer.value.startswith("forge_")}


@functools.cache
def validator(module: ModuleType, action: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(strict(copy.deepcopy(outputs_of(module)[action])))


def strict(schema: Any) -> Any:
    """A schema of which no object has further keys, unless it says so."""
    if isinstance(schema, dict):
        closed = {key: strict(value) for key, value in schema.items()}
        return {"additionalProperties": False, **closed} if "properties" in schema and "type" in schema else closed
    return [strict(each) for each in schema] if isinstance(schema, list) else schema
