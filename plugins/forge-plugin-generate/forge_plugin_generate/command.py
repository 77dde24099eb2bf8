"""`forge-run generate`: continue prompts with a trained model, or chat with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forge_core.cli.command_line import with_examples
from forge_core.contracts.errors import ExitCode, JobError, Problem
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, NUMBER, TEXT, Schema, array, keyed, with_keys
from forge_kit.tools.ranks import add_ranks, ranks_asked_for, run_on_ranks
from forge_plugin_generate.options import add_run, add_settings, check_path, check_speculation, separated

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.model import Model
    from forge_core.job import Job
    from forge_kit.tools.trained_model import TrainedModel
    from forge_plugin_generate.speculation import Speculated
    from forge_plugin_generate.stops import Stops


HEADING = "use"


def command(argv: list[str]) -> int:
    """Continue prompts with a trained model."""
    options = _options(argv)
    check_path(Path(options.path), options.device)
    if ranks_asked_for(options.nproc) > 1 and (options.interactive or (options.chat and not options.prompt)):
        what = "--interactive" if options.interactive else "--chat without --prompt"
        raise JobError(
            f"{what} reads standard input, which ranks do not have; ask several ranks by --prompt, or use one process"
        )
    # After the checks, whose errors every rank would repeat
    return run_on_ranks("generate", argv, options.nproc, partial(_generate, options))


def _generate(options: argparse.Namespace) -> int:
    """Generate in this process, alone or as one of several ranks, which all have the same prompts."""
    from forge_plugin_generate.chat import check_chat, talk
    from forge_plugin_generate.stops import Stops

    check = partial(check_chat, path=options.path) if options.chat else lambda tokenizer: None
    trained = load_trained(options.path, options.device, options.run, check, options.overrides)
    check_generation(trained)
    stops = Stops.of(trained.tokenizer, options.stop or ())
    answer = Continuing(trained, options, stops)
    if options.interactive:
        return _answer_lines(trained, options, stops, answer)
    if options.chat and not options.prompt:
        return talk(stops, answer, options, trained.job.train.seq_len)
    if options.stream:
        return _stream(trained, options, stops, answer)
    prompts: list[str] = options.prompt or [""]
    rows = _answers(trained, options, answer) if options.chat else _rows(trained, options, prompts, answer)
    texts = [stops.decode(row) for row in rows]
    if options.json:
        print_json(_facts(trained, options, prompts, texts, rows, answer.speculated))
    else:
        # An answer is shown alone, a continuation with its prompt
        _show(texts if options.chat else [prompt + text for prompt, text in zip(prompts, texts, strict=True)])
        answer.report()
    return ExitCode.FINISHED


def _answer_lines(trained: Trained, options: argparse.Namespace, stops: Stops, answer: Continuing) -> int:
    """Continue each line of standard input by itself; returns the exit code."""
    from forge_plugin_generate.terminal import Conversation

    if sys.stdin.isatty():
        print("each line is continued by itself; /help lists commands, Ctrl-C ends a text, Ctrl-D leaves")
    return Conversation(options, partial(_continue_aloud, trained, options, stops, answer), {}).run()


def _stream(trained: Trained, options: argparse.Namespace, stops: Stops, answer: Continuing) -> int:
    """Write the continuation of the only prompt, or the answer to it, as it is made; returns the exit code."""
    [prompt] = options.prompt or [""]
    try:
        _continue_aloud(trained, options, stops, answer, prompt)
    except KeyboardInterrupt:
        print(flush=True)
        return ExitCode.SECOND_SIGNAL
    return ExitCode.FINISHED


def _continue_aloud(
    trained: Trained, options: argparse.Namespace, stops: Stops, answer: Continuing, prompt: str
) -> None:
    from forge_plugin_generate.streaming import TextStream
    from forge_plugin_generate.terminal import write

    stream = TextStream(stops, write)
    shown = partial(answer, until=stream.show)
    if options.chat:
        [row] = _answers(trained, options, shown)
    else:
        write(prompt)
        [row] = _rows(trained, options, [prompt], shown)
    stream.finish(row)
    print(flush=True)
    answer.report()


def of_model(
    model: TrainedModel,
    prompt: str | Sequence[str] = "",
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    stop: Sequence[str] = (),
    bos: bool = True,
    seed: int | None = 0,
) -> str | list[str]:
    """Continue a text, or each of several as one batch: `load_model(run).generate("…")`.

    Args:
        model: of `forge_core.load_model`.
        prompt: the text, or a sequence of texts; an empty one starts a new document.
        max_tokens: upper bound of the new tokens of each.
        temperature: 0 takes the likeliest token.
        top_k: only the k likeliest tokens; 0: all.
        top_p: only the likeliest tokens that together have this probability.
        stop: further ends of a text, which do not belong to it: names of tokens, such as `<|im_end|>`, and texts.
        bos: whether prompts begin with the tokenizer's beginning of text, as documents do in training.
        seed: seed of the draws; None: torch's default generator.

    Returns:
        The new text, without the prompt; of several prompts, a list.

    Raises:
        ForgeError: the model has no tokenizer, or no cache to generate with.
        JobError: one of `stop` is empty, or no text of the tokenizer can hold it.
        ValueError: a setting is out of its range.
    """
    from forge_plugin_generate.generate import Sampling, generate
    from forge_plugin_generate.prompts import prompt_ids
    from forge_plugin_generate.stops import Stops

    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    # Ids of tokens would fail in the tokenizer, with an error that does not name the prompt
    if wrong := [each for each in prompts if not isinstance(each, str)]:
        raise TypeError(f"a prompt is a text, not {wrong[0]!r:.60}; model(ids) takes ids of tokens")
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"max_tokens must be a whole number of at least 1, not {max_tokens!r}")
    tokenizer = _demanded(model.tokenizer, model.checkpoint)
    stops = Stops.of(tokenizer, stop)
    rows = generate(
        model.model,
        [prompt_ids(tokenizer, text, bos=bos) for text in prompts],
        max_tokens,
        tokenizer.end_of_text,
        Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        stop=stops.ids,
        until=stops.reached,
        seed=seed,
    )
    texts = [stops.decode(row) for row in rows]
    return texts[0] if isinstance(prompt, str) else texts


def _facts(
    trained: Trained,
    options: argparse.Namespace,
    prompts: Sequence[str],
    texts: Sequence[str],
    rows: Sequence[Sequence[int]],
    speculated: Speculated | None,
) -> dict[str, Any]:
    """What `--json` prints: `step` and `texts` as in `samples.jsonl`, with the ids of the new tokens."""
    triples = zip(prompts, texts, rows, strict=True)
    return {
        "run": options.path,
        "checkpoint": trained.loaded.checkpoint,
        "step": trained.loaded.step,
        "texts": [{"prompt": prompt, "text": text, "ids": row} for prompt, text, row in triples],
        **({} if speculated is None else {"speculation": speculated.facts()}),
    }


def _answers(trained: Trained, options: argparse.Namespace, answer: Any) -> Sequence[Sequence[int]]:
    """Returns the ids of the answer to each message, each in a separate conversation."""
    from forge_plugin_generate.chat import first_turn

    return answer([first_turn(trained.tokenizer, options.system, text) for text in options.prompt])


def _rows(trained: Trained, options: argparse.Namespace, prompts: Sequence[str], answer: Any) -> list[list[int]]:
    """Returns the ids that continue prompts, which may have images and videos."""
    from forge_plugin_generate.prompts import prompt_ids

    tokenizer, bos = trained.tokenizer, not options.no_bos
    if options.image or options.video:
        return answer(*_with_files(prompts, options, trained.job, tokenizer))
    return answer([prompt_ids(tokenizer, prompt, bos=bos) for prompt in prompts])


class Continuing:
    """Continues prompts by the options of the command."""

    speculated: Speculated | None = None
    """What the last call has proposed, with `--speculate`."""

    def __init__(self, trained: Trained, options: argparse.Namespace, stops: Stops) -> None:
        self._trained, self._options, self._stops = trained, options, stops

    def __call__(
        self,
        ids: Sequence[Sequence[int]],
        entries: Mapping[str, Tensor] | None = None,
        until: Callable[[Sequence[int]], bool] | None = None,
    ) -> list[list[int]]:
        """Returns the ids that the model continues each prompt with."""
        from forge_plugin_generate.generate import Sampling, generate
        from forge_plugin_generate.speculation import speculate

        model, end, options = self._trained.model, self._trained.tokenizer.end_of_text, self._options
        sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
        until = until or self._stops.reached
        if options.speculate:
            self.speculated = speculate(
                model, ids, options.max_tokens, [end, *self._stops.ids], sampling, until=until, seed=options.seed
            )
            return self.speculated.rows
        device = next(model.parameters()).device
        return generate(
            model,
            ids,
            options.max_tokens,
            end,
            sampling,
            stop=self._stops.ids,
            until=until,
            seed=options.seed,
            use_cache=not options.no_cache,
            entries={name: tensor.to(device) for name, tensor in (entries or {}).items()},
        )

    def report(self) -> None:
        """Write how many proposals of the last call counted, if there were any."""
        if self.speculated is not None:
            print(self.speculated, file=sys.stderr)


def _show(texts: Sequence[str]) -> None:
    for text in texts:
        print(text)
        if len(texts) > 1:
            print("-" * 40)


def _with_files(
    prompts: Sequence[str], options: argparse.Namespace, job: Job, tokenizer: Tokenizer
) -> tuple[list[list[int]], dict[str, Tensor]]:
    from forge_core.plugins.catalog import Catalog
    from forge_plugin_generate.kinds import usual_prompt_maker

    files = {"image": options.image or (), "video": options.video or ()}
    return usual_prompt_maker(Catalog.installed())(prompts, files, job, tokenizer, bos=not options.no_bos)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options = separated(parser, argv)
    several = len(options.prompt or ()) > 1
    if options.system and not options.chat:
        parser.error("--system is the first message of a chat: add --chat")
    shown = next((name for name in ("image", "video") if getattr(options, name)), None)
    if options.chat and shown:
        parser.error(f"--chat supports text only; leave out --{shown} or --chat")
    if options.chat and options.no_bos:
        parser.error("--no-bos is for plain prompts: a chat begins as its template defines; leave out one of them")
    if options.interactive and (options.prompt or options.chat or shown):
        parser.error("--interactive reads plain prompts; leave --prompt, --chat, --image and --video out")
    if options.json and (options.interactive or (options.chat and not options.prompt)):
        what = "--interactive" if options.interactive else "--chat without --prompt"
        parser.error(f"--json prints one object at the end, and {what} is a conversation; give --prompt instead")
    check_speculation(parser, options)
    if options.speculate and shown:
        parser.error(f"--speculate supports text only; leave out --{shown} or --speculate")
    if options.json and options.stream:
        parser.error("--json prints one object at the end, and --stream writes a text as it is made; leave out one")
    if options.stream and several:
        parser.error("--stream writes one text as it is made, and several prompts are one batch; give one --prompt")
    # After the checks, which concern --stream only where it was given
    if options.stream is None:
        options.stream = sys.stdout.isatty() and not several and not options.json
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forge-run generate", description=command.__doc__)
    add_run(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue, with --chat a message to answer; repeat it for a batch",
    )
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="write a text as it is made (on a terminal, unless there are several)",
    )
    parser.add_argument("--interactive", action="store_true", help="continue each line of standard input, by itself")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer messages, using the chat template: the messages of --prompt, or a conversation as in `chat`",
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="with --chat: the system's message")
    parser.add_argument(
        "--image", action="append", metavar="FILE", help="image for the next <image> of the prompts; repeat it for more"
    )
    parser.add_argument(
        "--video", action="append", metavar="FILE", help="video for the next <video> of the prompts; repeat it for more"
    )
    parser.add_argument(
        "--no-bos", action="store_true", help="prompts without the tokenizer's beginning of text (begin_of_text)"
    )
    add_settings(parser)
    add_ranks(parser)
    add_json(parser, ": prompts, texts and ids of tokens")
    with_examples(
        parser,
        'forge-run generate runs/quickstart --prompt "def "',
        'forge-run generate runs/large --prompt "def " --nproc 2 --parallel.tp.degree=2',
        "forge-run generate runs/quickstart --interactive --temperature 0",
        "forge-run generate runs/quickstart/checkpoints/step-1500 --max-tokens 50 --seed 1",
    )
    return parser


class Trained(NamedTuple):
    """A trained model."""

    model: Model
    """In evaluation mode."""
    tokenizer: Tokenizer
    job: Job
    """The job of its training, with overrides and the stages that apply here."""
    loaded: TrainedModel
    """All of it, with layout and executor."""


def load_model_and_tokenizer(
    path: Path | str, device: str = "auto", run: Path | None = None
) -> tuple[Model, Tokenizer]:
    """Load model and tokenizer as `load_trained`."""
    trained = load_trained(path, device, run)
    return trained.model, trained.tokenizer


def load_trained(
    path: Path | str,
    device: str = "auto",
    run: Path | None = None,
    check: Callable[[Tokenizer], object] = lambda tokenizer: None,
    overrides: Sequence[str] = (),
) -> Trained:
    """Load model, tokenizer and job as `forge_core.load_model`, from which this differs in that it needs a tokenizer.

    Args:
        path: the run folder, whose newest checkpoint is taken, or the checkpoint.
        device: device of the model; as `train.device`; "auto" takes an accelerator if there is one.
        run: run folder with the tokenizer, if the checkpoint is elsewhere.
        check: is called with the tokenizer before the model is loaded, which may take long.
        overrides: keys of the job to change, `--section.key=value`. Several ranks share the model by the stages that
            these name, or else by the stages of its job; one process holds the whole model unless these name stages.

    Raises:
        ForgeError: as `forge_core.load_model`; or the model was trained without a tokenizer.
    """
    from forge_core import load_model

    names_stages, ranks = any(word.startswith("--parallel") for word in overrides), ranks_asked_for(None)
    try:
        loaded = load_model(
            path,
            device=device,
            run=run,
            parallel=ranks > 1 and not names_stages,
            overrides=overrides,
            check=lambda tokenizer: check(_demanded(tokenizer, path)),
        )
    except JobError as error:
        # Only problems of the stages need a hint, which depends on the number of ranks
        if not any(problem.path.startswith("parallel") for problem in error.problems) or (names_stages and ranks > 1):
            raise
        hint = "these are the stages of its training; name others in their place, such as --parallel.tp.degree=2"
        if names_stages:
            hint = "this is one process; --nproc N starts ranks"
        raise JobError([*error.problems, Problem("", hint)]) from error
    return Trained(loaded.model, _demanded(loaded.tokenizer, path), loaded.job, loaded)


def check_generation(trained: Trained) -> None:
    """Raise a `JobError` if stages have split the model and none defines how its ranks generate together."""
    from forge_kit.nn.generation import generates_jointly

    layout = trained.loaded.context.layout
    if layout.replicate != layout.world_size and not generates_jointly(trained.model):
        message = f"no stage of the layout ({layout}) lets its ranks generate together (forge_kit.nn.generation)"
        raise JobError([Problem("parallel", f"{message}; name others, or use one process")])


def _demanded(tokenizer: Tokenizer | None, path: Path | str) -> Tokenizer:
    from forge_core.contracts.errors import ForgeError

    if tokenizer is None:
        raise ForgeError(f"the job of {path} has no tokenizer, so prompts cannot be read")
    return tokenizer


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    texts = array(keyed(prompt=TEXT, text=TEXT, ids=array(COUNT)))
    speculation = keyed(calls=COUNT, proposed=COUNT, accepted=COUNT, accepted_length=NUMBER)
    answered = keyed(run=TEXT, checkpoint=TEXT, step=COUNT, texts=texts)
    return {"": with_keys(answered, speculation=speculation)}
