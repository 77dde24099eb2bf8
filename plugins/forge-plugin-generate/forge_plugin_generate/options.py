"""Options of `generate` and `chat`: their parsers, and checks before any model is loaded. Without torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forge_core.cli.command_line import parse_job_arguments, positive
from forge_core.contracts.errors import JobError
from forge_kit.tools.commands import count


def temperature(text: str) -> float:
    """A temperature, as `Sampling` demands, which is built only once the model is loaded."""
    if not 0 <= (value := float(text)) < math.inf:  # NaN is no number here: it fails each comparison
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def share(text: str) -> float:
    """A probability above 0."""
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


SETTINGS: Mapping[str, tuple[Callable[[str], float], float, str]] = {
    "max-tokens": (positive, 200, "tokens to generate at most (200)"),
    "temperature": (temperature, 0.8, "0: always the likeliest token (0.8)"),
    "top-k": (count, 0, "only the k likeliest tokens; 0: all (0)"),
    "top-p": (share, 0.95, "only the likeliest with this probability (0.95)"),
    "seed": (count, 0, "seed of the sampling (0)"),
}
"""What a conversation can change, too: type, default and help."""
CHANGEABLE = ("model", "parallel", "plugins", "train.precision", "train.float32_matmul", "train.deterministic")
"""Tables and keys of a job that change how a trained model computes."""
KEYS = (
    "a key of the run's job, its value written as in TOML, of model, plugins, parallel, and train.precision, "
    "train.float32_matmul, train.deterministic. --parallel.… names stages in place of the job's"
)
METAVARS = {"max-tokens": "N", "temperature": "X", "top-k": "N", "top-p": "P", "seed": "N"}


def separated(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line that may change keys of the run's job: `overrides` has these, `--section.key=value`.

    Raises:
        JobError: a key changes nothing of what a trained model computes.
    """
    options, _, overrides = parse_job_arguments(parser, argv, keys=KEYS)
    for word in overrides:
        key = word.removeprefix("--").partition("=")[0]
        if not any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE):
            # The only key of [train] that has an option in its place
            hint = "; the device is an option: --device" if key == "train.device" else ""
            raise JobError(f"{word}: changes nothing here; what can be changed is {', '.join(CHANGEABLE)}{hint}")
    options.overrides = overrides
    return options


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names what was trained."""
    parser.add_argument("path", metavar="RUN", help="a run folder (its newest checkpoint) or a checkpoint")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options of sampling, and of where the model is and runs."""
    for name, (type_, default, help_) in SETTINGS.items():
        parser.add_argument(f"--{name}", type=type_, default=default, metavar=METAVARS[name], help=help_)
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="a text, or a token, at which an answer ends; repeat it for more",
    )
    parser.add_argument(
        "--run", type=Path, metavar="FOLDER", help="run folder with the tokenizer, if the checkpoint is elsewhere"
    )
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="where to compute, as the key train.device (auto)"
    )
    parser.add_argument(
        "--speculate",
        action="store_true",
        help="let the modules of multi-token prediction propose tokens, and show how many count: the same text",
    )
    parser.add_argument("--no-cache", action="store_true", help="recompute everything for each token (for comparison)")


def check_speculation(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program with an error if `--speculate` is beside `--no-cache`, which it could not respect."""
    if options.speculate and options.no_cache:
        parser.error("--speculate reads text by the cache; leave out --no-cache, or --speculate")


def check_path(path: Path, device: str) -> None:
    """Check that there is a checkpoint to load, and the device.

    Raises:
        JobError: there is none.
    """
    from forge_core.checkpoint.resume import in_storage
    from forge_core.checkpoint.run_folder import storage_of
    from forge_core.checkpoint.storage import MANIFEST

    if not path.exists() and in_storage(path) == path:
        raise JobError(f"{path}: no such run folder or checkpoint")
    # A model in the format of Hugging Face needs another command, which the error names
    if (path / "config.json").is_file() and not (path / MANIFEST).is_file():
        run = f"runs/{path.absolute().name}"
        command = f"forge-run weights import {path} --out {run}"
        raise JobError(f"{path} is a published model, not a run; make a run of it by `{command}`, and name {run}")
    if not (path / MANIFEST).is_file() and not path.name.startswith("step-") and not storage_of(path).steps():
        raise JobError(f"{path} is neither a checkpoint nor a run folder with checkpoints")
    if device not in ("auto", "cpu"):
        from forge_core.parallel.mesh import choose_device

        try:
            choose_device(device)
        except JobError as error:
            raise JobError(f"--device {error.problems[0].message}") from None
