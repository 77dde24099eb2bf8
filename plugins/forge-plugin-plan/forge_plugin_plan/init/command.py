"""`forge-run init`: write a first job."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import with_examples
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, TEXT, Schema, array, keyed, maybe, of
from forge_kit.tools.outputs import free_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forge_core.plugins.catalog import Catalog
    from forge_plugin_plan.init.corpora import Corpus
    from forge_plugin_plan.init.job_text import Draft
    from forge_plugin_plan.init.sizes import Machine, Sizes

PROGRAM = "forge-run init"
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
COUNTS = {"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}
DEFAULT_TIME = "10m"
SOURCES = ("text", "dataset", "tokens", "stdlib")


HEADING = "start"


def command(argv: list[str]) -> int:
    """Write a first job for your data, with sizes for this machine.

    The sizes also suit the time that you give, and every key has a comment. Without options on a terminal, the command
    prompts for them. The job is checked before it is written, and nothing is overwritten.
    """
    options = _parse(argv)
    from forge_core.contracts.errors import ExitCode
    from forge_core.plugins.catalog import Catalog

    catalog = Catalog.installed()
    path = Path(options.job)
    draft = make_draft(options, catalog)
    write_checked(draft, path, catalog)
    if options.json:
        print_json(_as_json(draft, path))
    else:
        _report(draft, path)
    return ExitCode.FINISHED


def _parse(argv: list[str]) -> argparse.Namespace:
    from forge_core.contracts.errors import JobError

    parser = _parser()
    options = parser.parse_args(argv)
    # Before questions and measurements, so that an existing file is an error at once
    options.job = str(free_path(Path(options.job), PROGRAM))
    if not Path(options.job).absolute().parent.is_dir():
        raise JobError(f"{PROGRAM}: there is no folder {Path(options.job).parent}; make it first")
    given = [name for name in SOURCES if getattr(options, name)]
    if not given and _may_ask(argv):
        from forge_plugin_plan.init.questions import ask

        ask(options)
        given = [name for name in SOURCES if getattr(options, name)]
    if len(given) != 1:
        what = "--text FOLDER, --dataset NAME, --tokens FOLDER or --stdlib"
        saw = f"{' and '.join(f'--{name}' for name in given)} are given" if given else "nothing is given"
        raise JobError(f"{PROGRAM}: say what to train on, by one of {what}; {saw}")
    _check_combinations(options)
    return options


def _may_ask(argv: Sequence[str]) -> bool:
    # Any option, such as --yes, rules out questions: the error then lists the choices
    asked_nothing = not any(argument.startswith("-") for argument in argv)
    return asked_nothing and sys.stdin.isatty() and sys.stdout.isatty()


def _check_combinations(options: argparse.Namespace) -> None:
    from forge_core.contracts.errors import JobError, Problem

    # Problems are collected, so that one call reports all of them
    lonely = [name for name in ("messages", "config", "tokenizer") if getattr(options, name) and not options.dataset]
    problems = [f"--{name} goes with --dataset" for name in lonely]
    # It has a default, so that it cannot be checked like the options above
    if options.split != "train" and not options.dataset:
        problems.append("--split goes with --dataset")
    if options.messages and not (options.tokenizer or options.start):
        problems.append("--messages: chats need a tokenizer with a chat template; give --tokenizer PATH, or --from RUN")
    if options.memory and not options.tflops:
        problems.append("--memory requires --tflops; the memory of this machine is measured")
    if options.start and options.parameters:
        problems.append("--parameters: the model of --from has its size; leave it out")
    if options.start and (options.tokens or options.tokenizer):
        other = "--tokens" if options.tokens else "--tokenizer"
        problems.append(f"{other}: the model of --from has its own tokenizer; leave it out")
    if problems:
        raise JobError([Problem("", f"{PROGRAM}: {problem}") for problem in problems])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description=command.__doc__)
    add = parser.add_argument
    add("job", nargs="?", default="job.toml", metavar="JOB.toml", help="the file to write (job.toml)")
    data = parser.add_argument_group("what to train on, one of")
    text = "a file, folder or glob of text: .txt, .md, .py, .jsonl, each also .gz or .zst; repeat it for more"
    data.add_argument("--text", action="append", metavar="PATH", help=text)
    data.add_argument(
        "--dataset", metavar="NAME", help="a Hugging Face dataset: its name on the hub, a folder or a file"
    )
    data.add_argument("--tokens", metavar="FOLDER", help="tokens that forge-run data prepare wrote")
    data.add_argument("--stdlib", action="store_true", help="Python's standard library, to try things out")
    data.add_argument(
        "--field", default="text", metavar="NAME", help="field of a row or JSON line with its text (text)"
    )
    data.add_argument("--messages", default="", metavar="NAME", help="with --dataset: field of a row with a chat")
    data.add_argument("--config", default="", metavar="NAME", help="with --dataset: its configuration")
    data.add_argument("--split", default="train", metavar="NAME", help="with --dataset: the split to train on (train)")
    data.add_argument("--tokenizer", default="", metavar="PATH", help="with --dataset: a tokenizer that exists")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--time", type=seconds_of, metavar="T", help=f"how long to train: 90s, 30m, 8h, 2d ({DEFAULT_TIME})"
    )
    sizes.add_argument(
        "--parameters", type=parameter_count, metavar="N", help="size of the model instead: 300k, 10M, 1.5B"
    )
    speed = "speed of matrix products on the machine to train on; by default this machine is measured"
    sizes.add_argument("--tflops", type=positive_number, metavar="X", help=speed)
    sizes.add_argument("--no-trial", action="store_true", help="estimate by matrix products only, without trying steps")
    memory = "with --tflops: GB of memory of its device, so that batches fit"
    sizes.add_argument("--memory", type=positive_number, metavar="GB", help=memory)
    start = "run folder of an imported model to train further (forge-run weights import)"
    sizes.add_argument("--from", dest="start", default="", metavar="RUN", help=start)
    add("--name", metavar="NAME", help="name of the run (the name of the data)")
    add("--yes", action="store_true", help="ask nothing, also on a terminal")
    add_json(parser, ": what was chosen")
    tune = "forge-run init tune.toml --from runs/qwen3 --dataset chats.jsonl --messages messages"
    with_examples(parser, "forge-run init", "forge-run init --text ~/books --time 30m", tune)
    return parser


def seconds_of(text: str) -> float:
    """Returns the seconds of `90s`, `30m`, `8h` or `2d`."""
    return _scaled(text, SECONDS, "a time such as 90s, 30m, 8h or 2d")


def parameter_count(text: str) -> int:
    """Type of the option `--parameters`."""
    return round(_scaled(text, COUNTS, "a number such as 300k, 10M or 1.5B"))


def _scaled(text: str, units: dict[str, Any], what: str) -> float:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)([{''.join(units)}])", text)
    # 0 matches the pattern, but is no size and no time
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return float(match[1]) * float(units[match[2]])


def positive_number(text: str) -> float:
    """Type of the options `--tflops` and `--memory`."""
    value = float(text)
    # Written as a range, so that NaN is refused as well
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


# --- from options to a job ---------------------------------------------------------------------------------------


def make_draft(options: argparse.Namespace, catalog: Catalog) -> Draft:
    """Look at data and machine, and choose the sizes."""
    from forge_plugin_plan.init.job_text import Draft
    from forge_plugin_plan.init.machine import stated_machine, this_machine
    from forge_plugin_plan.init.model_sizes import start_file, tuning_sizes
    from forge_plugin_plan.init.sizes import Budget, Data, choose, token_estimate, vocabulary_for

    # Run and data before the machine: their errors do not wait for a measurement
    start = start_file(options.start) if options.start else ""
    corpus = _corpus(options)
    machine = stated_machine(options.tflops, options.memory) if options.tflops else this_machine()
    seconds = options.time
    # With --from, the length of the run follows from epochs of the data instead
    if seconds is None and options.parameters is None and not start:
        seconds = seconds_of(DEFAULT_TIME)
    budget = Budget(seconds=seconds, parameters=options.parameters)
    if start:
        sizes, vocab_size = tuning_sizes(start, corpus, budget, machine, catalog)
    else:
        vocab_size = corpus.vocab_size or vocabulary_for(corpus.text_bytes, budget, machine)
        tokens = corpus.tokens or token_estimate(corpus.text_bytes, vocab_size)
        data = Data(tokens=tokens, vocab_size=vocab_size)
        sizes = choose(budget, machine, data)
        # The machine of --tflops may be another one, on which no steps can be tried
        if machine.measured and not options.no_trial:
            machine = _tried(machine, sizes, vocab_size)
            sizes = choose(budget, machine, data)
    return Draft(
        name=_free_name(options.name or corpus.name),
        corpus=corpus,
        vocab_size=vocab_size,
        machine=machine,
        budget=budget,
        sizes=sizes,
        start=start,
        # A table of a plugin that is not installed would make the job wrong
        curves=bool(catalog.matching("logger", "curves")),
        samples=bool(catalog.matching("hook", "samples")) and bool(corpus.prompt),
    )


def _tried(machine: Machine, sizes: Sizes, vocab_size: int) -> Machine:
    """The machine with the efficiency of some steps of the training that was chosen for it."""
    from attrs import evolve

    from forge_plugin_plan.init.sizes import LEAST_EFFICIENCY
    from forge_plugin_plan.init.trial import efficiency

    # Not to standard output, which has the JSON of --json
    if sys.stderr.isatty():
        print("trying some steps …", file=sys.stderr)
    return evolve(machine, efficiency=max(LEAST_EFFICIENCY, efficiency(sizes, vocab_size, machine)), tried=True)


def _corpus(options: argparse.Namespace) -> Corpus:
    from forge_plugin_plan.init import corpora

    if options.text:
        return corpora.own_text(options.text, options.field)
    if options.tokens:
        return corpora.prepared_tokens(options.tokens)
    if options.stdlib:
        return corpora.stdlib()
    rest = (options.field, options.messages, options.config, options.split, options.tokenizer)
    return corpora.hugging_face(options.dataset, *rest)


def _free_name(name: str) -> str:
    """The name, or one like it whose run folder is not there yet: a run of another job could not continue in it."""
    taken = {path.name for path in Path("runs").iterdir()} if Path("runs").is_dir() else set()
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def write_checked(draft: Draft, path: Path, catalog: Catalog) -> None:
    """Check the job, then write it.

    Raises:
        JobError: it is not right; nothing is written.
    """
    import tempfile

    from forge_core.config.load import load_job
    from forge_plugin_plan.init.job_text import render

    text = render(draft, str(path))
    # Checked as a file and not as a table, exactly as `forge-run` reads it later
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder, path.name)
        trial.write_text(text, encoding="utf-8")
        # The imported model comes first: the job that follows has no [model] table
        load_job(*([draft.start] if draft.start else []), trial, catalog=catalog, world_size=1)
    with path.open("x", encoding="utf-8") as file:  # never over a file that came to be meanwhile
        file.write(text)


def _report(draft: Draft, path: Path) -> None:
    import textwrap

    from forge_plugin_plan.init.job_text import command_of, reasons

    print(f"{path} is written, and right:")
    for subject, sentence in reasons(draft):
        print(textwrap.fill(f"  {subject:<9}{sentence}", 100, subsequent_indent=" " * 11))
    files = command_of(draft, str(path))
    print(f"\nlook at the data:  forge-run data {files}\ntrain:             forge-run {files}")


def _as_json(draft: Draft, path: Path) -> dict[str, Any]:
    from attrs import asdict

    return {
        "path": str(path),
        "start": draft.start or None,
        "name": draft.name,
        "sizes": asdict(draft.sizes) | {"tokens": draft.sizes.tokens},
        "vocab_size": draft.vocab_size,
        "machine": asdict(draft.machine),
        "budget": asdict(draft.budget),
        "data": {
            "bytes": draft.corpus.text_bytes,
            "tokens": draft.corpus.tokens,
            "remarks": list(draft.corpus.remarks),
        },
    }


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    from forge_plugin_plan.init.sizes import Budget, Machine, Sizes

    draft = keyed(
        path=TEXT,
        start=maybe(TEXT),
        name=TEXT,
        sizes=of(Sizes, tokens=COUNT),
        vocab_size=COUNT,
        machine=of(Machine),
        budget=of(Budget),
        data=keyed(bytes=maybe(COUNT), tokens=maybe(COUNT), remarks=array(TEXT)),
    )
    return {"": draft}
