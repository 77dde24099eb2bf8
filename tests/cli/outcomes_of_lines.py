"""Run command lines, each in its folder, and print as JSON how each ended: for `test_first_hour.py`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).parents[1]))

import catalogs

from forge_core.checkpoint.run_folder import owned
from forge_core.cli import main


def accepted(number: int, frame: object) -> None:
    raise TimeoutError("this mistake has been accepted, and runs")


def forge(line: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(line.split()) == 0


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def outcome_of(row: dict[str, Any]) -> dict[str, Any]:
    os.chdir(row["folder"])
    stack = contextlib.ExitStack()
    exec(row["before"], {"forge": forge, "flip": flip, "owned": owned, "mock": mock, "Path": Path, "stack": stack})
    there = "torch" in sys.modules
    before = {str(path) for path in Path().rglob("*")}
    os.environ.update(row["variables"])
    signal.alarm(row["limit_s"])
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = int(main(row["arguments"]))
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = 1
            traceback.print_exc()
    signal.alarm(0)
    stack.close()
    for name in row["variables"]:
        del os.environ[name]
    os.environ["FORGE_CACHE"] = row["cache"]
    after = {str(path) for path in Path().rglob("*")} - before
    return {
        "code": code,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "created": sorted(after),
        "torch": "torch" in sys.modules and not there,
    }


if __name__ == "__main__":
    sys.dont_write_bytecode = True  # what a line leaves behind is compared, and Python would leave its cache
    catalogs.install()  # most of what a line takes is otherwise a scan of what is installed
    signal.signal(signal.SIGALRM, accepted)
    print(json.dumps([outcome_of(row) for row in json.loads(sys.stdin.read())]))
