"""The evaluation `tasks`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import matches_re, min_len

from forge_core.contracts.components import EvaluationComponent
from forge_core.contracts.errors import DataError, ForgeError, JobError, Problem
from forge_plugin_evaluate.tasks.kinds import TaskComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext, Evaluation, EvaluationContext
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_evaluate.tasks.rows import EncodedTasks

Metric = Literal["acc", "acc_per_char", "acc_per_byte", "bits_per_byte"]


@frozen(kw_only=True)
class Tasks(EvaluationComponent):
    """Multiple-choice tasks, measured as OLMES does (Gu et al. 2024): which choice is likeliest after its context.

    Logs each of `metrics` as `{prefix}/{task}/{metric}`, its standard error as `{prefix}/{task}/{metric}_stderr`, and
    under every layout the same numbers.
    """

    tasks: tuple[TaskComponent, ...] = field(validator=min_len(1))
    """`[[evaluations.NAME.tasks]]`: the tasks, by type."""
    metrics: tuple[Metric, ...] = field(
        default=("acc", "acc_per_char", "acc_per_byte", "bits_per_byte"), validator=min_len(1)
    )
    """acc: the share of items whose likeliest choice is right; by chance, one over the choices. acc_per_char,
    acc_per_byte: the same with the logarithm of the probability divided by the choice's characters or bytes, so that
    long choices have a chance. bits_per_byte: bits that the right choice costs for each of its bytes, which falls
    smoothly from the first step on, where accuracies still are at chance."""
    too_long: Literal["refuse", "leave_out"] = "refuse"
    """An item longer than `train.seq_len`: an error before the first step, or left out, and counted as
    `{prefix}/{task}/left_out`."""
    prefix: str = field(default="", validator=matches_re(r"[\w./-]*"))
    """Prefix of the names of the metrics. Empty: the name of this table."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks for a tokenizer and for distinct names; items are encoded in `build`."""
        if job.data.tokenizer is None:
            yield Problem("", "tasks are text, which needs a tokenizer; add [data.tokenizer], or leave this out")
        for label, count in Counter(task.label for task in self.tasks).items():
            if count > 1:
                message = f"{count} tasks are called {label!r} in the metrics"
                yield Problem("tasks", f"{message}; give all but one another `name`")

    def build(self, context: BuildContext) -> Evaluation:
        """Load and encode all items, so that one that is too long fails before the first step. Collective."""
        from forge_core.parallel.mesh import gather_objects

        if context.tokenizer is None:  # an evaluation given from Python has not been checked
            raise JobError(list(self.problems(context.job, context.layout)))
        encoded = encoded_tasks(self, context.job, context.tokenizer, context.layout)
        # Ranks sum what they know of each row, so they must mean the same one. Files and libraries may differ.
        if len(set(gather_objects(encoded.digest()))) > 1:
            raise ForgeError(
                "ranks have different items in their tasks; give all of them the same files and versions of Python"
            )
        return partial(self.measure, encoded)

    def measure(self, encoded: EncodedTasks, context: EvaluationContext) -> Mapping[str, float]:
        """Returns the metrics of all tasks."""
        from forge_plugin_evaluate.tasks.measuring import log_probabilities
        from forge_plugin_evaluate.tasks.scores import metrics_of

        values = log_probabilities(context, encoded.rows)
        prefix, metrics, start = self.prefix or self._own_name(context.job), dict[str, float](), 0
        for task in encoded.tasks:
            own = values[start : start + len(task.choices)]
            start += len(task.choices)
            measured = metrics_of(task.items, own, self.metrics)
            if self.too_long == "leave_out":
                measured["left_out"] = task.left_out
            metrics |= {f"{prefix}/{task.label}/{name}": value for name, value in measured.items()}
        return metrics

    def _own_name(self, job: Job) -> str:
        # By identity: two tables with equal keys are equal, and have different names
        return next((name for name, evaluation in job.evaluations.items() if evaluation is self), "tasks")


def encoded_tasks(evaluation: Tasks, job: Job, tokenizer: Tokenizer, layout: Layout) -> EncodedTasks:
    """Load and encode the tasks of an evaluation.

    Raises:
        JobError: a task cannot be read, an item is too long, or a choice has no token other than its context's.
    """
    from forge_plugin_evaluate.tasks.rows import ChoiceRows, EncodedTasks, encode, row_length

    longest, leave_out = job.train.seq_len, evaluation.too_long == "leave_out"
    try:
        tasks = [encode(tokenizer, t.label, t.load(), longest, leave_out=leave_out) for t in evaluation.tasks]
    except DataError as error:
        raise JobError(str(error)) from error
    choices = [row for task in tasks for row in task.choices]
    # One length for all tasks, so that rows of several tasks share a batch
    length = row_length(max(row.positions for row in choices), longest, layout)
    return EncodedTasks(tuple(tasks), ChoiceRows(choices, length, tokenizer.end_of_text))
