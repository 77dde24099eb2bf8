"""Runs the GPU benchmarks, piece by piece, each in a process of its own and in less than ten minutes.

    python tests/gpu --list
    python tests/gpu --out results                                  # all, on the GPU
    python tests/gpu --out results --piece numerics --piece waits
    python tests/gpu --out results --tests                          # first the tests of this folder
    python tests/gpu --out results --tiny                           # the small form, on a CPU where there is no GPU

Each piece writes NAME.json and NAME.md into the folder. The exit code is 1 if a check of any failed, or a piece did not
end. Forge need not be installed: its metadata is written beside the results, and put on the path.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_S = 590.0
"""For one piece, its start included."""
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Threads that wait do not spin; freed memory of one size serves another, which a full GPU needs."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _options(arguments)
    if options.here:
        return _run_here(options.here, options)
    _make_importable(options.out)
    pieces = _pieces()
    if options.list:
        print("\n".join(f"{name:<24}{piece.summary}" for name, piece in pieces.items()))
        return 0
    if unknown := [name for name in options.piece if name not in pieces]:
        raise SystemExit(f"no piece {unknown[0]!r}; there are {', '.join(pieces)}")
    codes = {"tests": _test()} if options.tests else {}
    if not options.device:
        options.device = _device(options.tiny)
    if not options.device:
        print("no CUDA device: torch finds none. --tiny runs the small form on the CPU")
        return 2
    codes |= {name: _run_apart(name, options) for name in options.piece or pieces}
    print("\n".join(f"{name:<24}{'ok' if code == 0 else f'exit code {code}'}" for name, code in codes.items()))
    return int(any(codes.values()))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests/gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the pieces, and run nothing")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for results (gpu-results)")
    parser.add_argument("--piece", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--tests", action="store_true", help="first run the tests of tests/gpu that are for CUDA")
    parser.add_argument("--tiny", action="store_true", help="small sizes, which take seconds")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default CUDA, and with --tiny a CPU if need be")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _pieces():  # type: ignore[no-untyped-def]
    sys.path.insert(0, str(HERE.parent))
    import gpu.pieces  # noqa: F401
    from gpu.bench import PIECES

    return PIECES


def _make_importable(out: Path) -> None:
    """Start again with the checkout on the path, if Forge is not installed."""
    try:
        metadata.version("forge-run")
    except metadata.PackageNotFoundError:
        sys.path.insert(0, str(HERE))
        from offline import search_path

        path = search_path((out / "metadata").resolve(), os.environ.get("PYTHONPATH", ""))
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONPATH": path})


def _device(tiny: bool) -> str:
    """CUDA where there is some, else the CPU for what is tiny."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu" if tiny else ""


def _test() -> int:
    """The exit code of pytest, of the tests that need CUDA; those are skipped, with the reason, where there is none."""
    command = [sys.executable, "-m", "pytest", "-rs", "-k", "cuda", "--rootdir", str(HERE.parents[1]), str(HERE)]
    print("--- tests", flush=True)
    try:
        return subprocess.run(command, env=ENVIRONMENT | os.environ, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return 124


def _run_apart(name: str, options: argparse.Namespace) -> int:
    """One piece in a process of its own: what one leaves on the device is gone when the next begins."""
    command = [sys.executable, str(HERE), "--here", name, "--out", str(options.out)]
    command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    print(f"--- {name}", flush=True)
    try:
        return subprocess.run(command, env=ENVIRONMENT | os.environ, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        print(f"{name}: not done after {LIMIT_S:.0f} s", flush=True)
        return 124


def _run_here(name: str, options: argparse.Namespace) -> int:
    piece = _pieces()[name]
    import torch

    from gpu.bench import Bench, missing, write

    if absent := missing(piece.requires):
        print(f"{name}: needs {', '.join(absent)}, which is not installed")
        return 3
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="forge-gpu-") as folder:
        bench = Bench(torch.device(options.device), options.tiny, Path(folder))
        try:
            piece.run(bench)
        except Exception as error:
            bench.failures.append(f"{type(error).__name__}: {error}")
            traceback.print_exc()
        write(name, bench, time.perf_counter() - start, options.out)
    print((options.out / f"{name}.md").read_text(), flush=True)
    return int(bool(bench.failures))


if __name__ == "__main__":
    sys.exit(main())
