"""`python -m forge_testing.pretend FILE NAME RESULT`: calls a function of a file on the pretended device.

Its arguments come pickled from the standard input, after the path of modules; its result goes pickled to RESULT.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

from forge_testing.pretend import register


def main() -> None:
    """Load the file as a module of its own, and call the function."""
    file, name, result = sys.argv[1:]
    sys.path[:] = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that has started this one
    register()
    function: Any = attrgetter(name)(_module_of(Path(file)))
    arguments = pickle.load(sys.stdin.buffer)  # noqa: S301
    Path(result).write_bytes(pickle.dumps(function(*arguments)))


def _module_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"pretended_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
