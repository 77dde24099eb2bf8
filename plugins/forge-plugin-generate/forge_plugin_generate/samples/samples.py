"""The hook `samples`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import define, field
from attrs.validators import and_, ge, gt, le, min_len

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ForgeError, JobError, Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_kit.nn.generation import Generates


@define(kw_only=True, slots=False)
class Samples(TrainingHook):
    """Lets the model continue some texts, prints them, and appends them to `samples.txt` in the run folder.

    `samples.jsonl` has the same as records, for programs. Loggers that take files get `samples.txt` each time.

    Training is the same with and without it; a run that stops to be continued samples later. Where a layout splits the
    model, its ranks generate together; otherwise rank 0 samples alone.
    """

    resumes_as = "safe"

    prompts: tuple[str, ...] = field(default=("",), validator=min_len(1))
    """Texts to continue; an empty one starts a new document. Each begins with the tokenizer's beginning of text."""
    max_tokens: int = field(default=120, validator=gt(0))
    """Upper bound of the tokens to write; fewer where the model ends its document, or its turn of a chat."""
    stop: tuple[str, ...] = ()
    """Further ends of a text, which do not belong to it: names of tokens (`<|im_end|>`), and texts."""
    temperature: float = field(default=0.8, validator=ge(0))
    """Divides the logits; 0 takes the most likely token."""
    top_k: int = field(default=0, validator=ge(0))
    """Only the k most likely tokens; 0: all."""
    top_p: float = field(default=0.95, validator=and_(gt(0), le(1)))
    """Only the most likely tokens that together have this probability."""
    seed: int = field(default=0, validator=ge(0))
    """Seed of the draws, the same at every step: what changes between samples is the model."""
    every_eval: bool = False
    """Whether to sample after each evaluation too, not only at the end of training."""

    sampled_step = -1  # of this process and not in its state: a finished run that is started again samples again

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if job.data.tokenizer is None:
            yield Problem("", "sampling text needs a tokenizer; add [data.tokenizer], or leave the hook out")

    def on_train_begin(self, context: TrainContext) -> None:
        """Refuse before the first step what only shows now; hooks passed from Python have not been checked at all."""
        from forge_core.parallel.layout import plan_layout
        from forge_core.parallel.mesh import world_size
        from forge_kit.nn.generation import Generates, generates_jointly

        layout, _ = plan_layout(context.job, world_size())
        problems = [*self.problems(context.job, layout), *self._stop_problems(context.tokenizer)]
        if not isinstance(context.model, Generates):
            name = type(context.model).__name__
            problems.append(Problem("model", f"{name} has no new_cache and decode, so it cannot generate samples"))
        elif layout.replicate != layout.world_size and not generates_jointly(context.model):
            message = f"no stage of the layout ({layout}) lets its ranks generate together (forge_kit.nn.generation)"
            problems.append(Problem("", f"{message}; leave the hook out, and run forge-run generate afterwards"))
        elif context.tokenizer is not None:
            problems += self._length_problems(context.model, context.tokenizer)
        if problems:
            raise JobError(problems)

    def _length_problems(self, model: Generates, tokenizer: Tokenizer) -> Iterator[Problem]:
        """Yields a problem if prompt and continuation may be longer than the model can see (learned positions)."""
        from forge_plugin_generate.prompts import prompt_ids

        longest = max(len(prompt_ids(tokenizer, prompt)) for prompt in self.prompts)
        try:
            # The model checks the length when it makes a cache; the cache itself is not used
            model.new_cache(1, longest + self.max_tokens)
        except ForgeError as error:
            yield Problem("max_tokens", str(error))

    def _stop_problems(self, tokenizer: Tokenizer | None) -> Iterator[Problem]:
        from forge_plugin_generate.stops import Stops

        try:
            if tokenizer is not None:
                Stops.of(tokenizer, self.stop)
        except JobError as error:
            yield Problem("stop", str(error))

    def on_eval_end(self, context: StepContext, metrics: Mapping[str, float]) -> None:
        if self.every_eval:
            self._sample(context)

    def on_train_end(self, context: TrainContext) -> None:
        # A run that stops to be continued, on a signal say, has no time to lose; its continuation samples.
        goes_on = bool(context.requests.stop) and not context.requests.final
        is_over = context.step >= context.job.train.steps or not goes_on
        if is_over and self.sampled_step != context.step:
            self._sample(context)

    def _sample(self, context: TrainContext) -> None:
        from forge_core.engine.evaluation import evaluation_mode
        from forge_core.parallel.mesh import global_rank
        from forge_kit.nn.generation import generates_jointly
        from forge_kit.tools.sampled_texts import SampledText, SampledTexts
        from forge_plugin_generate.samples.output import keep, show
        from forge_plugin_generate.samples.sampling import continuations

        self.sampled_step = context.step
        with evaluation_mode(context.model, context.optimizer):  # on every rank: swapping weights may be collective
            # Within the block, since restoring the weights may be collective as well
            if global_rank() != 0 and not generates_jointly(context.model):
                return
            pairs = zip(self.prompts, continuations(self, context), strict=True)
            texts = tuple(SampledText(prompt=prompt, text=text) for prompt, text in pairs)
        if global_rank() != 0:
            return
        # Ranks that generate together have the same texts; one of them writes
        sampled = SampledTexts(step=context.step, texts=texts)
        show(sampled)
        if context.folder is not None:
            sampled.append(context.folder)
            context.log_artifact(keep(context.folder, sampled))
