"""Prompts of the commands, and texts of single tokens. Without torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import ForgeError, JobError
from forge_kit.data.tokenizers import begin_of_text
from forge_kit.tools.json_output import add_json
from forge_kit.tools.output_schema import COUNT, TEXT, Schema, array, keyed
from forge_kit.tools.outputs import output_file

if TYPE_CHECKING:
    from forge_kit.tools.trained_model import TrainedModel

SUFFIXES = (".png",)
UNREADABLE = "\N{REPLACEMENT CHARACTER}"
SHOWN = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍", "$": r"\$"})
"""What stands for characters that could not be seen; matplotlib reads a text between dollars as a formula."""


def add_model(parser: argparse.ArgumentParser, picture: str) -> None:
    """Add the arguments that name what was trained, and where the picture goes."""
    parser.add_argument("path", metavar="RUN", help="a run folder (its newest checkpoint) or a checkpoint")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"picture to write (RUN/{picture}.png)")
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="where to compute, as the key train.device (auto)"
    )
    parser.add_argument(
        "--run", type=Path, metavar="FOLDER", help="run folder with the tokenizer, if the checkpoint is elsewhere"
    )
    parser.add_argument("--no-bos", action="store_true", help="prompts without the tokenizer's beginning of text")
    add_json(parser, " in place of the table")


def load(options: argparse.Namespace) -> tuple[TrainedModel, Tokenizer]:
    """Load a model whole, whatever layout it was trained under, and its tokenizer.

    Raises:
        JobError: there is no such run, or `--out` cannot be written.
        ForgeError: the model was trained without a tokenizer.
    """
    from forge_core import load_model

    if options.out is not None:  # before the minutes that it takes to load and to compute
        output_file(options.out, "--out", SUFFIXES)
    if not Path(options.path).exists():
        raise JobError(f"{options.path}: no such run folder or checkpoint")
    trained = load_model(options.path, device=options.device, run=options.run)
    if trained.tokenizer is None:
        raise ForgeError(f"the job of {options.path} has no tokenizer, so prompts cannot be read")
    return trained, trained.tokenizer


def prompt_ids(tokenizer: Tokenizer, text: str, options: argparse.Namespace) -> list[int]:
    """Returns the ids of a prompt, beginning as documents do in training.

    Raises:
        JobError: it has no tokens.
    """
    ids = [*([] if options.no_bos else begin_of_text(tokenizer)), *tokenizer.encode(text)]
    if not ids:
        raise JobError(f"the prompt {text!r} has no tokens")
    return ids


def token_text(tokenizer: Tokenizer, id_: int, has_glyphs: Callable[[str], bool] = bool) -> str:
    """Returns a token as a short text for a table or a picture; its number where it is not a text by itself.

    Args:
        tokenizer: of the model.
        id_: the token.
        has_glyphs: whether what shows the text can show its letters, as a font of a picture may not.
    """
    text = tokenizer.decode([id_]).translate(SHOWN)
    # A family of emoji is several, joined by a character of no width that counts as unprintable.
    printable = text.replace("\N{ZERO WIDTH JOINER}", "").isprintable()
    return text if text and UNREADABLE not in text and printable and has_glyphs(text) else f"#{id_}"


def token_texts(tokenizer: Tokenizer, ids: Sequence[int], has_glyphs: Callable[[str], bool] = bool) -> list[str]:
    """Returns `token_text` of each."""
    return [token_text(tokenizer, id_, has_glyphs) for id_ in ids]


def run_facts(options: argparse.Namespace, trained: TrainedModel) -> dict[str, Any]:
    """Returns what was loaded, for `--json`: the run as the user named it, the checkpoint and its step."""
    return {"run": options.path, "checkpoint": trained.checkpoint, "step": trained.step}


def prompt_keys() -> Mapping[str, Schema]:
    """Returns the schemas of the keys that commands about one prompt begin with."""
    token = keyed(id=COUNT, text=TEXT)
    return {
        "run": TEXT,
        "checkpoint": TEXT,
        "step": COUNT,
        "prompt": TEXT,
        "tokens": array(token),
        "picture": TEXT,
    }


def token_facts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Returns id and text of each token for `--json`, the text as the tokenizer decodes it alone."""
    return [{"id": id_, "text": tokenizer.decode([id_])} for id_ in ids]


def picture_path(options: argparse.Namespace, name: str) -> Path:
    """Returns the path of the picture: `--out`, or a file in the run folder (for a checkpoint, its run's folder)."""
    path = Path(options.path)
    # A checkpoint is RUN/checkpoints/step-N
    folder = path.parent.parent if path.name.startswith("step-") else path
    return output_file(options.out or folder / f"{name}.png", "--out", SUFFIXES)


def title_of(trained: TrainedModel, what: str) -> str:
    """Returns the title of a picture: run, step, and `what` it shows."""
    return f"{trained.job.job.name}, step {trained.step:,}: {what}"
