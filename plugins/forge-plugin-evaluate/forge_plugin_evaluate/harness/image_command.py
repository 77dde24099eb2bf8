"""`forge-run evaluate --harness lmms-eval`: tasks of lmms-eval on a trained vision-language model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forge_core.contracts.errors import ExitCode, JobError, Problem
from forge_kit.tools.json_output import only_json
from forge_kit.tools.ranks import ranks_asked_for
from forge_plugin_evaluate.harness.around import RequestTimes
from forge_plugin_evaluate.harness.command import give_results
from forge_plugin_evaluate.harness.task_names import matching_tasks
from forge_plugin_generate.command import load_trained

EXTRA = 'pip install "forge-plugin-evaluate[images]"'


def evaluate_images(options: argparse.Namespace) -> int:
    """Evaluate in this process.

    Raises:
        JobError: lmms-eval is not installed, or has no such task, or the options ask for what it cannot do.
    """
    if problems := list(_problems(options)):
        raise JobError(problems)
    from lmms_eval import evaluator
    from lmms_eval.utils import make_table

    from forge_plugin_evaluate.harness.images import ForgeLMM

    # It replaces the metaclass of filelock 3, which filelock 4 does not have, so that datasets loaded within each other
    # cannot wait for one another's lock. Here one process loads one after the other.
    if find_spec("filelock._api") is None:
        evaluator._enable_reentrant_filelocks._patched = True
    times = RequestTimes()
    with only_json(options.json):
        manager, tasks = _tasks(options.tasks, options.include)
        trained = load_trained(options.path, options.device, options.run, overrides=options.overrides)
        model = ForgeLMM(
            trained.model,
            trained.tokenizer,
            trained.job,
            max_length=options.max_length or trained.job.train.seq_len,
            batch_size=options.batch_size,
            chat=options.chat,
            system=options.system,
            seed=options.seed,
        )
        times.follow(model)
        results = evaluator.simple_evaluate(
            model=model,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=options.few_shot,
            batch_size=options.batch_size,
            limit=options.limit,
            gen_kwargs=options.gen_kwargs,
            log_samples=options.items,
            bootstrap_iters=options.bootstrap,
        )
    results["checkpoint"], results["step"] = str(trained.loaded.checkpoint), trained.loaded.step
    results["times"] = times.facts()
    give_results(options, results, make_table)
    return ExitCode.FINISHED


def _problems(options: argparse.Namespace) -> Iterator[Problem]:
    if find_spec("lmms_eval") is None:
        yield Problem("--harness", f"lmms-eval is not installed; {EXTRA}")
    if find_spec("forge_plugin_images") is None:
        yield Problem("--harness", f"lmms-eval shows images, which need forge-plugin-images; {EXTRA}")
    if (ranks := ranks_asked_for(options.nproc)) > 1:
        message = f"{ranks} ranks, but lmms-eval uses a single process here"
        yield Problem("--nproc", f"{message}; leave it out, or use the evaluations of forge-plugin-vlm-eval")
    if options.system and not options.chat:
        yield Problem("--system", "a system's message is part of a chat; add --chat")
    yield from (Problem("--include", f"{folder} is not a folder") for folder in options.include if not folder.is_dir())


def _tasks(names: str, folders: Sequence[Path]) -> tuple[Any, list[str]]:
    """Returns the harness' manager of tasks, and the tasks that names and globs mean; raises `JobError` if none is."""
    from lmms_eval.tasks import TaskManager

    manager = TaskManager(include_path=[str(folder) for folder in folders] or None)
    return manager, matching_tasks(manager, names, "lmms-eval")
