"""`forge-run evaluate`: tasks of lm-evaluation-harness on a trained model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import positive, with_examples
from forge_core.contracts.errors import ExitCode, ForgeError
from forge_core.launch.world import join_world
from forge_kit.tools.commands import count
from forge_kit.tools.json_output import add_json, only_json, plain, print_json
from forge_kit.tools.output_schema import ANYTHING, COUNT, NUMBER, TEXT, Schema, by_name, keyed
from forge_kit.tools.outputs import MARK, output_file, write_output
from forge_kit.tools.ranks import add_ranks, run_on_ranks
from forge_plugin_evaluate.harness.around import RequestTimes, describe, quiet_commit
from forge_plugin_generate.options import check_path, separated

if TYPE_CHECKING:
    from forge_plugin_evaluate.harness.model import ForgeLM


HEADING = "use"


def command(argv: list[str]) -> int:
    """Evaluate a trained model on tasks of lm-evaluation-harness."""
    parser = _parser()
    options = separated(parser, argv)
    if options.items and options.out is None and not options.json:
        parser.error("--items adds every question and answer to the results: give --out or --json too")
    if options.out is not None:
        # Now, and not after hours of computation whose results could not be written
        options.out = output_file(options.out, "--out")
    check_path(Path(options.path), options.device)
    if options.harness == "lmms-eval":
        from forge_plugin_evaluate.harness.image_command import evaluate_images

        return evaluate_images(options)
    if find_spec("lm_eval") is None:
        raise ForgeError("lm-evaluation-harness is not installed: pip install 'forge-plugin-evaluate[harness]'")
    return run_on_ranks("evaluate", argv, options.nproc, partial(_evaluate, options))


def _evaluate(options: argparse.Namespace) -> int:
    """Evaluate in this process, alone or as one of several ranks, each of which has all tasks and results."""
    from lm_eval import simple_evaluate
    from lm_eval.utils import make_table

    times = RequestTimes()
    with only_json(options.json), quiet_commit():
        manager, tasks = _tasks(options.tasks, options.include)
        lm = _load(options)
        times.follow(lm)
        results = simple_evaluate(
            model=lm,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=options.few_shot,
            batch_size=options.batch_size,
            limit=options.limit,
            gen_kwargs=options.gen_kwargs,
            system_instruction=options.system or None,
            apply_chat_template=options.chat,
            log_samples=options.items,
            bootstrap_iters=options.bootstrap,
            confirm_run_unsafe_code=options.unsafe_code,
        )
    if join_world().rank == 0:
        info = results["config"]
        facts = {"checkpoint": info["checkpoint"], "step": info["step"], "times": times.facts()}
        give_results(options, {**facts, **results}, make_table)
    return ExitCode.FINISHED


def give_results(options: argparse.Namespace, results: Mapping[str, Any], make_table: Any) -> None:
    """Print the results of a harness, as its tables or as JSON, and write them to `--out`.

    Args:
        options: of the command.
        results: all of them, with `checkpoint`, `step` and `times`.
        make_table: the harness' function of that name.
    """
    if options.json:
        print_json(results)
    else:
        print(make_table(results))
        if results.get("groups"):
            print(make_table(results, "groups"))
        print(describe(results["times"]), file=sys.stderr)
    if options.out:
        text = json.dumps({"generator": MARK, **plain(results)}, indent=1, ensure_ascii=False)
        write_output(options.out, "--out", text + "\n")


def _tasks(names: str, folders: Sequence[Path]) -> tuple[Any, list[str]]:
    """Returns the harness' manager of tasks, and the tasks that names and globs mean.

    Raises:
        JobError: there is no such task, or no such folder.
    """
    from lm_eval.tasks import TaskManager

    from forge_core.contracts.errors import JobError, Problem
    from forge_plugin_evaluate.harness.task_names import matching_tasks

    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise JobError([Problem("--include", f"{folder} is not a folder") for folder in missing])

    class Manager(TaskManager):  # type: ignore[misc]  # the harness has no types
        """Reports in one line why a task or its data, which the harness fetches in `load`, cannot be loaded."""

        def load(self, *arguments: Any, **options: Any) -> Any:
            try:
                return super().load(*arguments, **options)
            except (OSError, ValueError, KeyError, ImportError) as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                hint = "its data comes from the Hugging Face hub, or from the files that its dataset_kwargs name"
                raise JobError([Problem("--tasks", f"a task of {names} cannot be loaded: {reason}; {hint}")]) from error

    paths = [str(folder) for folder in folders]
    manager = Manager(include_path=paths, include_defaults=False)
    # Reading the harness' own tasks takes ten seconds, which tasks of the user's folders do not need. A group, a tag or
    # a glob may mean tasks of both.
    if not {name.strip() for name in names.split(",")} <= set(manager.all_subtasks):
        manager = Manager(include_path=paths or None)
    return manager, matching_tasks(manager, names, "lm-eval")


def _load(options: argparse.Namespace) -> ForgeLM:
    from forge_plugin_evaluate.harness.model import ForgeLM
    from forge_plugin_evaluate.harness.shared_model import SharedLM
    from forge_plugin_generate.command import check_generation, load_trained

    trained = load_trained(options.path, options.device, options.run, overrides=options.overrides)
    loaded, layout = trained.loaded, trained.loaded.context.layout
    info = {"checkpoint": str(loaded.checkpoint), "step": loaded.step, "precision": trained.job.train.precision}
    settings = {
        "max_length": options.max_length or trained.job.train.seq_len,
        "batch_size": options.batch_size,
        "chat": options.chat,
        "seed": options.seed,
    }
    if layout.world_size == 1:
        return ForgeLM(trained.model, trained.tokenizer, info=info, **settings)
    check_generation(trained)
    return SharedLM(loaded, trained.tokenizer, info={**info, "layout": str(layout)}, **settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forge-run evaluate", description=command.__doc__)
    parser.add_argument("path", metavar="RUN", help="a run folder (its newest checkpoint) or a checkpoint")
    parser.add_argument(
        "--harness",
        default="lm-eval",
        choices=("lm-eval", "lmms-eval"),
        help="whose tasks: lm-evaluation-harness (lm-eval), or lmms-eval for images (needs the extra [images])",
    )
    parser.add_argument("--tasks", required=True, metavar="NAMES", help="tasks or groups, with commas; globs too")
    parser.add_argument(
        "--include", action="append", type=Path, default=[], metavar="FOLDER", help="folder with tasks of your own"
    )
    parser.add_argument("--few-shot", type=count, metavar="N", help="worked examples before each question (the task's)")
    parser.add_argument("--limit", type=float, metavar="N", help="first N items of each task; below 1: this share")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="rows computed together (8)")
    parser.add_argument(
        "--max-length", type=positive, metavar="N", help="positions of a row; longer ones are cut (train.seq_len)"
    )
    parser.add_argument("--chat", action="store_true", help="ask by the chat template")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system's message, or a text before each")
    parser.add_argument(
        "--gen-kwargs", metavar="K=V,…", help="settings of tasks that generate: max_gen_toks=64,temperature=0.7"
    )
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="seed of tasks that sample (0)")
    parser.add_argument("--bootstrap", type=count, default=1000, metavar="N", help="draws for standard errors (1000)")
    parser.add_argument("--unsafe-code", action="store_true", help="allow tasks that run the code that a model writes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all results there, as JSON")
    parser.add_argument("--items", action="store_true", help="with --out or --json: every question and answer too")
    add_json(parser, ": what --out writes")
    parser.add_argument(
        "--run", type=Path, metavar="FOLDER", help="run folder with the tokenizer, if the checkpoint is elsewhere"
    )
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="where to compute, as the key train.device (auto)"
    )
    add_ranks(parser)
    with_examples(
        parser,
        "forge-run evaluate runs/quickstart --tasks hellaswag,arc_easy --limit 100",
        "forge-run evaluate runs/chat --tasks gsm8k --chat --few-shot 5 --out results.json",
        "forge-run evaluate runs/large --tasks hellaswag --nproc 2 --parallel.tp.degree=2",
    )
    return parser


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    # All but the first three keys are the harness' own, which may have more with another version
    seconds = dict.fromkeys(("before_s", "requests_s", "between_s", "after_s"), NUMBER)
    of_harness = {name: by_name(ANYTHING) for name in ("results", "configs", "versions", "config")}
    results = keyed(checkpoint=TEXT, step=COUNT, times=keyed(**seconds), **of_harness)
    return {"": results | {"additionalProperties": ANYTHING}}
