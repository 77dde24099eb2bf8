"""`forge-run generate`: continue prompts with a trained model, or chat with it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from forge_core.cli.command_line import positive

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.model import Model
    from forge_core.job import Job


def command(argv: list[str]) -> int:
    """Continue prompts with the model of a run or checkpoint, or chat with it."""
    options = _options(argv)
    from forge_plugin_generate.chat import answer_once, talk
    from forge_plugin_generate.prompts import stop_ids

    trained = load_trained(options.path, options.device, options.run)
    answer = partial(_continued, trained, options, stop_ids(trained.tokenizer, options.stop or ()))
    if not options.chat:
        _show(_continuations(trained, options, answer))
    elif options.prompt:
        _show(answer_once(trained.tokenizer, answer, options.system, options.prompt))
    else:
        talk(trained.tokenizer, answer, options.system)
    return 0


def _continuations(trained: Trained, options: argparse.Namespace, answer: Any) -> list[str]:
    """Returns each prompt with its continuation."""
    from forge_plugin_generate.prompts import prompt_ids

    tokenizer, bos = trained.tokenizer, not options.no_bos
    prompts: list[str] = options.prompt or [""]
    if options.image:
        rows = answer(*_with_images(prompts, options.image, trained.job, tokenizer, bos))
    else:
        rows = answer([prompt_ids(tokenizer, prompt, bos=bos) for prompt in prompts])
    return [prompt + tokenizer.decode(row) for prompt, row in zip(prompts, rows, strict=True)]


def _continued(
    trained: Trained,
    options: argparse.Namespace,
    stop: Sequence[int],
    ids: Sequence[Sequence[int]],
    entries: Mapping[str, Tensor] | None = None,
) -> list[list[int]]:
    """Returns the ids that the model continues each prompt with, by the options of the command."""
    from forge_plugin_generate.generate import Sampling, generate

    model, tokenizer, _ = trained
    device = next(model.parameters()).device
    return generate(
        model,
        ids,
        options.max_tokens,
        tokenizer.end_of_text,
        Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p),
        stop=stop,
        seed=options.seed,
        use_cache=not options.no_cache,
        entries={name: tensor.to(device) for name, tensor in (entries or {}).items()},
    )


def _show(texts: Sequence[str]) -> None:
    for text in texts:
        print(text)
        if len(texts) > 1:
            print("-" * 40)


def _with_images(
    prompts: Sequence[str], files: Sequence[str], job: Job, tokenizer: Tokenizer, bos: bool
) -> tuple[list[list[int]], dict[str, Tensor]]:
    from forge_core.contracts.errors import ForgeError

    try:
        from forge_plugin_images.prompts import prompts_with_images
    except ImportError as error:
        raise ForgeError("--image needs forge-plugin-images; pip install forge-plugin-images") from error
    return prompts_with_images(prompts, files, job, tokenizer, bos=bos)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.system and not options.chat:
        parser.error("--system is the first message of a chat: add --chat")
    if options.chat and options.image:
        parser.error("--chat knows texts only; leave --image out, or --chat")
    if options.chat and options.no_bos:
        parser.error("--no-bos is for plain prompts: a chat begins as its template says; leave one of the two out")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forge-run generate", description=command.__doc__)
    parser.add_argument(
        "path", metavar="RUN_OR_CHECKPOINT", help="a run folder (its newest checkpoint) or a checkpoint"
    )
    parser.add_argument(
        "--prompt", action="append", help="text to continue, with --chat a message to answer; repeat it for a batch"
    )
    parser.add_argument(
        "--chat", action="store_true", help="answer messages, by the chat template: lines of standard input, or prompts"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="with --chat: the system's message")
    parser.add_argument(
        "--image", action="append", metavar="FILE", help="image for the next <image> of the prompts; repeat it for more"
    )
    parser.add_argument("--max-tokens", type=positive, default=200, help="tokens to generate a prompt (200)")
    parser.add_argument(
        "--stop", action="append", metavar="TOKEN", help="a further token at which an answer ends; repeat it for more"
    )
    parser.add_argument(
        "--no-bos", action="store_true", help="prompts without the tokenizer's beginning of text (begin_of_text)"
    )
    parser.add_argument("--temperature", type=_temperature, default=0.8, help="0: always the likeliest token (0.8)")
    parser.add_argument("--top-k", type=_count, default=0, help="only the k likeliest tokens; 0: all (0)")
    parser.add_argument("--top-p", type=_share, default=0.95, help="only the likeliest with this probability (0.95)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (0)")
    parser.add_argument(
        "--run", type=Path, metavar="FOLDER", help="run folder with the tokenizer, if the checkpoint is elsewhere"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--no-cache", action="store_true", help="recompute everything for each token (for comparison)")
    return parser


# As `Sampling` demands, which is built only once the model is loaded. NaN is no number here: it fails each comparison.


def _temperature(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def _share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


class Trained(NamedTuple):
    """A trained model."""

    model: Model
    """In evaluation mode."""
    tokenizer: Tokenizer
    job: Job
    """The job of its training, without its stages."""


def load_model_and_tokenizer(
    path: Path | str, device: Literal["auto", "cpu", "cuda"] = "auto", run: Path | None = None
) -> tuple[Model, Tokenizer]:
    """Load model and tokenizer as `load_trained`."""
    trained = load_trained(path, device, run)
    return trained.model, trained.tokenizer


def load_trained(path: Path | str, device: Literal["auto", "cpu", "cuda"] = "auto", run: Path | None = None) -> Trained:
    """Load the trained model, in evaluation mode, the tokenizer and the job of a run folder or checkpoint.

    Args:
        path: the run folder, whose newest checkpoint is taken, or the checkpoint.
        device: device of the model; "auto" takes a GPU if there is one.
        run: run folder with the tokenizer; by default `find_run` searches for it.

    Raises:
        CheckpointError: there is no intact checkpoint, or the tokenizer is not the one of its training.
        ForgeError: the run has no tokenizer.
    """
    import attrs

    from forge_core.checkpoint.resume import locate
    from forge_core.checkpoint.run_diff import check_tokenizer
    from forge_core.checkpoint.state import load_model
    from forge_core.config.load import parse_job
    from forge_core.engine.build import build_context, build_model, build_tokenizer
    from forge_core.plugins.catalog import Catalog

    checkpoint, manifest = locate(Path(path), "sizes")
    catalog = Catalog.installed()
    job = parse_job(manifest["job"], str(checkpoint / "manifest.json"), catalog)
    job = attrs.evolve(job, parallel={}, train=attrs.evolve(job.train, device=device))
    context: Any = build_context(job, catalog, find_run(job, checkpoint, [run] if run else [Path(path)]))
    tokenizer = build_tokenizer(job, context)
    assert tokenizer is not None
    check_tokenizer(manifest["provenance"], {"tokenizer": tokenizer.fingerprint()})
    context = attrs.evolve(context, tokenizer=tokenizer)
    model = build_model(job, context).model
    load_model(checkpoint, model)
    model.eval()
    return Trained(model, tokenizer, job)


def find_run(job: Job, checkpoint: Path, first: Sequence[Path]) -> Path:
    """Find the run folder with the tokenizer of a checkpoint, which may lie elsewhere, as on another disk.

    Args:
        job: the job of the checkpoint.
        checkpoint: folder of the checkpoint.
        first: folders to search before those beside the checkpoint and that of the job's name.

    Raises:
        ForgeError: none of them has a tokenizer.
    """
    from forge_core.checkpoint.run_folder import TOKENIZER, run_folder
    from forge_core.contracts.errors import ForgeError

    if job.data.tokenizer is None:
        raise ForgeError(f"the job of {checkpoint} has no tokenizer, so prompts cannot be read")
    folders = [*first, checkpoint.parent.parent, run_folder(job)]
    for folder in folders:
        if (folder / TOKENIZER).is_dir():
            return folder
    searched = ", ".join(dict.fromkeys(map(str, folders)))
    raise ForgeError(f"there is no tokenizer of {checkpoint} in {searched}; give the folder of its run: --run FOLDER")
