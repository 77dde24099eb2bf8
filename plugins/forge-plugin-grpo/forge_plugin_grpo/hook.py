"""The hook that draws completions before a step and puts them in the place of the prompts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define
from torch import Tensor

from forge_core import ForgeError, TrainingHook
from forge_core.parallel import mesh
from forge_core.parallel.initialise import seed_of
from forge_kit.nn.adapters import evaluating
from forge_kit.nn.batches import replace_rows
from forge_kit.nn.routes import without_routes
from forge_kit.torch_internals import detect_fake_mode
from forge_plugin_generate.prompts import stop_ids
from forge_plugin_grpo.advantages import ADVANTAGES as ADVANTAGES_OF
from forge_plugin_grpo.grpo import GRPO
from forge_plugin_grpo.kinds import Drawn, Sampler
from forge_plugin_grpo.objective import ADVANTAGES, OLD, REFERENCE, policy_loss_of
from forge_plugin_grpo.prompts import encode_prompt
from forge_plugin_grpo.scoring import Scorer, weighted
from forge_plugin_grpo.slots import in_slots, routes_in_slots
from forge_plugin_losses.adapters_off import check_adapters, without_adapters
from forge_plugin_losses.reference_path import ADAPTERS_OFF

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.data import Batch


@define(kw_only=True, slots=False)
class Rollouts(TrainingHook):
    """Draws `group` completions of each prompt, scores them, and trains on them for `updates` steps.

    Logs means over the completions of all ranks: `reward`, `reward/NAME` of each reward, `reward/std`, the mean
    standard deviation of a group; `reward/equal`, the share of groups whose completions all have one reward, from which
    nothing is learned; `completions/tokens` and `completions/ended`. With `dynamic_sampling`, these are of the first
    draw; `redraws` is the mean number of further draws of a row, `redraws/equal` the share of rows that still have one
    reward after them.
    """

    loss: GRPO

    def __attrs_post_init__(self) -> None:
        # No fields, which would be state: what is kept between updates is, and `state_dict` has it
        self._rows: list[Batch] = []
        self._restored: dict[str, Tensor] = {}
        self._sampler: Sampler | None = None
        self._is_first = True

    @property
    def played_in_plans(self) -> bool:
        """See `forge_plugin_plan.lines.PlayedInPlans`: plans count the forward pass with adapters off."""
        return self.loss.reference == ADAPTERS_OFF

    def on_train_begin(self, context: TrainContext) -> None:
        """Builds the sampler, and checks that the model can be its reference. Collective."""
        assert context.build is not None, "a run has a context of its build"
        self._build = context.build
        tokenizer = self._build.tokenizer
        assert tokenizer is not None, "Prompts.problems refuses jobs without a tokenizer"
        self._stops = stop_ids(tokenizer)
        self._padding = tokenizer.end_of_text
        self._scorer = Scorer(self.loss, tokenizer, self._stops)
        self._sample_rank = mesh.sample_rank(self._build.mesh, self._build.layout)
        build: Any = self._build.build
        if self.loss.reference == ADAPTERS_OFF:
            check_adapters(context.model, self._build.mesh)
        self._sampler = build(self.loss.rollout, max_tokens=self.loss.max_tokens, stops=self._stops)

    def on_step_begin(self, context: StepContext) -> None:
        """Replaces the rows of the step."""
        if detect_fake_mode() is not None:
            # A planned step, whose tokens have no values to draw from: the reference alone is computed
            assert context.build is not None
            self._build, self._rows = context.build, list(context.batches)
            self._add_reference(context)
            return
        begins = (context.step - 1) % self.loss.updates == 0
        if self._restored and not begins:
            self._rows = self._own_part(context, self._restored)
        self._restored = {}
        # No rows between two updates: a run that continues with other `updates` or another batch than it began with
        if begins or not self._rows:
            policy_loss_of(self._build.auxiliary).forget()
            self._rows = self._draw(context)
            if self.loss.reference == ADAPTERS_OFF:
                self._add_reference(context)
        replace_rows(context, self._rows)

    def on_step_end(self, context: StepContext) -> None:
        """Keeps the log-probabilities of the first update for the next ones. Collective then."""
        if context.step % self.loss.updates == 0:
            self._rows = []
        elif self._rows and OLD not in self._rows[0]:
            built = policy_loss_of(self._build.auxiliary)
            self._add(OLD, built.old_log_p)
            if built.reference is not None:
                self._add(REFERENCE, built.reference_log_p)
            built.forget()

    def _add_reference(self, context: StepContext) -> None:
        """Add the log-probabilities under the model with its adapters off. Collective."""
        assert context.executor is not None
        measure = policy_loss_of(self._build.auxiliary).whole_log_p
        rows = [without_routes(each) for each in self._rows]  # a reference routes by itself
        self._add(REFERENCE, without_adapters(context.executor, context.model, rows, measure))

    def _add(self, name: str, values: Sequence[Tensor]) -> None:
        """Add an entry (B, 1, S) to the rows, from (B, S) of each micro-batch. Collective in a pipeline."""
        pipeline = mesh.pipeline_group(self._build.mesh)
        if pipeline is not None:
            # Its last rank alone computes losses, and checkpoints have the rows of all. Float64 holds all dtypes.
            shapes = [rows["labels"].shape for rows in self._rows]
            device = self._build.device
            every = [value.double() for value in values] or [
                torch.zeros(shape, device=device, dtype=torch.float64) for shape in shapes
            ]
            for value in every:
                torch.distributed.all_reduce(value, group=pipeline)
            values = every
        self._rows = [{**rows, name: value[:, None]} for rows, value in zip(self._rows, values, strict=True)]

    # --- completions -------------------------------------------------------------------------------------------------

    def _draw(self, context: StepContext) -> list[Batch]:
        prompts, lines, sources = self._prompts(context)
        first = self._first_row(context, len(prompts))
        drawn, parts = self._complete(context, prompts, lines, range(first, first + len(prompts)))
        rewards = weighted(self.loss, parts)
        means = self._log(context, drawn, rewards, parts)
        equal: Tensor | float = means["reward/equal"]  # a tensor is not waited for after the first step
        if self.loss.dynamic_sampling:
            equal = self._redraw(context, first, sources, prompts, drawn, rewards)
        if self._is_first and mesh.global_rank() == 0 and equal == 1:
            equals = f"rewards of the first completions are equal for each prompt, on average {means['reward']:.3g}"
            ended = f"{means['completions/ended']:.0%} of them ended within loss.max_tokens = {self.loss.max_tokens}"
            warnings.warn(f"{equals}, so that nothing is learned from them; {ended}", stacklevel=2)
        self._is_first = False
        return list(self._batches(context, prompts, drawn, ADVANTAGES_OF[self.loss.algorithm](rewards)))

    def _complete(
        self,
        context: StepContext,
        prompts: Sequence[Sequence[int]],
        lines: Sequence[Mapping[str, Any]],
        places: Iterable[int],
        attempt: int = 0,
    ) -> tuple[list[Drawn], dict[str, Tensor]]:
        """Draw and score a group for each prompt. Every rank calls it at the same time.

        Args:
            context: of the step.
            prompts: token ids of P prompts.
            lines: of the data, that they are from.
            places: of their rows in the global batch.
            attempt: 0, or the number of the further draw.

        Returns:
            `group` completions of each prompt, in order, and (P, group) scores by the name of the reward.
        """
        group = self.loss.group
        again = f":{attempt}" if attempt else ""
        rows = [place * group + number for place in places for number in range(group)]
        seeds = [seed_of(f"{context.job.job.seed}:rollout:{context.step}:{row}{again}") for row in rows]
        assert self._sampler is not None
        # Not `evaluation_mode` of the engine: averages of weights, as `ema` and schedule-free optimizers evaluate, are
        # another policy than the one whose gradient is computed
        with torch.no_grad(), evaluating(context.model):
            drawn = list(self._sampler(context.model, [ids for ids in prompts for _ in range(group)], seeds))
        self._check(drawn, len(seeds))
        scores = self._scorer(drawn, [line for line in lines for _ in range(group)])
        return drawn, {name: each.view(-1, group) for name, each in scores.items()}

    def _check(self, drawn: Sequence[Drawn], count: int) -> None:
        """Check what a rollout, which may be a user's, returned.

        Raises:
            ForgeError: there are more or fewer completions than prompts, or one is too long.
        """
        name, most = f"loss.rollout: {type(self.loss.rollout).__name__}", self.loss.max_tokens
        if len(drawn) != count:
            raise ForgeError(f"{name} gives {len(drawn)} completions for {count} prompts; let it give one for each")
        for one in drawn:
            if len(one.ids) > most:
                message = f"{name} gives a completion of {len(one.ids)} tokens, and loss.max_tokens is {most}"
                raise ForgeError(f"{message}; let it end there, with the last token included")
            if len(one.log_p) != len(one.ids):
                message = f"{name} gives {len(one.log_p)} values of log_p for a completion of {len(one.ids)} tokens"
                raise ForgeError(f"{message}; let it give one for each")

    def _redraw(
        self,
        context: StepContext,
        first: int,
        sources: Sequence[int],
        prompts: list[list[int]],
        drawn: list[Drawn],
        rewards: Tensor,
    ) -> float:
        """Replace, in place, groups without a spread of rewards by groups of other prompts. Collective.

        Returns:
            The share of rows, of all ranks, whose completions still have one reward.
        """
        group = self.loss.group
        redraws = torch.zeros((), dtype=torch.float64)
        # Of all ranks, so that all leave the loop after the same draw: the next one is collective
        share = self._mean(_equal(rewards))
        for attempt in range(1, self.loss.dynamic_sampling + 1):
            if not share:
                break
            rows = _equal(rewards).nonzero()[:, 0].tolist()
            # Ranks draw together: one with nothing to replace draws for its first row, and drops the result
            chosen = rows or [0]
            lines = [self._other_line(context, sources[row], first + row, attempt) for row in chosen]
            assert self._build.tokenizer is not None
            others = [encode_prompt(self._build.tokenizer, line["prompt"]) for line in lines]
            completions, parts = self._complete(context, others, lines, [first + row for row in chosen], attempt)
            scores = weighted(self.loss, parts)
            for number, row in enumerate(rows):
                prompts[row] = others[number]
                drawn[row * group : (row + 1) * group] = completions[number * group : (number + 1) * group]
                rewards[row] = scores[number]
            redraws += len(rows)
            share = self._mean(_equal(rewards))
        # Spread over this rank's rows: `_mean` divides by the rows of all ranks
        context.log("redraws", self._mean(redraws.expand(len(prompts)) / len(prompts)))
        context.log("redraws/equal", share)
        return share

    def _other_line(self, context: StepContext, source: int, place: int, attempt: int) -> Mapping[str, Any]:
        """A line of the same source, drawn by step and place alone: the same one in every layout."""
        sources: Any = context.job.data.sources
        lines = sources[source].lines()
        # A seed has 63 bits, so its remainder is as good as uniform
        return lines[seed_of(f"{context.job.job.seed}:redraw:{context.step}:{place}:{attempt}") % len(lines)]

    def _mean(self, values: Tensor) -> float:
        """The mean over the rows of all ranks, from (R,) of this one's. Collective."""
        sums = torch.stack([values.double().sum(), torch.tensor(float(len(values)), dtype=torch.float64)])
        total = mesh.all_reduce_samples(sums.to(self._build.device), self._build.mesh)
        return (total[0] / total[1]).item()

    def _prompts(self, context: StepContext) -> tuple[list[list[int]], list[Mapping[str, Any]], list[int]]:
        """The prompts of this rank's rows, and the lines and sources that they are from."""
        sources: Any = context.job.data.sources
        prompts: list[list[int]] = []
        lines: list[Mapping[str, Any]] = []
        numbers: list[int] = []
        for batch in context.batches:
            entries = (batch[name].tolist() for name in ("input_ids", "prompt_tokens", "sources", "numbers"))
            for ids, length, source, number in zip(*entries, strict=True):
                prompts.append(ids[:length])
                lines.append(sources[source].lines()[number])
                numbers.append(source)
        return prompts, lines, numbers

    def _first_row(self, context: StepContext, rows: int) -> int:
        """The place of this rank's first row in the global batch: completions are drawn by it, alike in all layouts."""
        return self._sample_rank * rows

    def _batches(
        self, context: StepContext, prompts: Sequence[Sequence[int]], drawn: Sequence[Drawn], advantages: Tensor
    ) -> Iterator[Batch]:
        """The micro-batches of the step: each row has the completions of its prompt, in slots of equal width."""
        group, device = self.loss.group, self._build.device
        done = 0
        for batch in context.batches:
            size, length = batch["input_ids"].shape
            own = drawn[done * group : (done + size) * group]
            made = in_slots(prompts[done : done + size], own, group, length, self._padding)
            made[ADVANTAGES] = advantages[done : done + size]
            if self.loss.replay_routes:
                made |= routes_in_slots(own, group, length, type(self.loss.rollout).__name__)
            # Of expanded entries all rows share memory; in a batch, each has a part of it
            yield {name: entry.contiguous().to(device) for name, entry in made.items()}
            done += size

    def _log(
        self, context: StepContext, drawn: Sequence[Drawn], rewards: Tensor, parts: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Log means over all ranks, and return them. Collective."""
        sums = {
            # Everything is divided by the number of completions: values of a group count `group` times
            "reward": rewards.sum(),
            **{f"reward/{name}": scores.sum() for name, scores in parts.items()},
            "reward/std": rewards.std(1).sum() * self.loss.group,
            "reward/equal": _equal(rewards).sum() * self.loss.group,
            "completions/tokens": torch.tensor(sum(len(one.ids) for one in drawn)),
            "completions/ended": torch.tensor(sum(bool(one.ids) and one.ids[-1] in self._stops for one in drawn)),
            "": torch.tensor(len(drawn)),
        }
        flat = torch.stack([value.double() for value in sums.values()]).to(self._build.device)
        mesh.all_reduce_samples(flat, self._build.mesh)
        means = dict(zip(sums, flat / flat[-1], strict=True))
        del means[""]
        for name, value in means.items():
            context.log(name, value)
        return means

    # --- state: the rows of a step that is not the last one on them --------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the rows of the whole global batch, as tensors, between two updates on them. Collective then."""
        if not self._rows:
            return {}
        # On the CPU: a pickled tensor comes back on the device it was on, which is another rank's GPU
        own = {name: torch.cat([rows[name] for rows in self._rows]).cpu() for name in self._rows[0]}
        of_ranks: dict[int, dict[str, Tensor]] = {}
        for rank, entries in mesh.gather_objects((self._sample_rank, own)):
            # Ranks that share rows have the same entries, but for the routes of a pipeline's layers
            of_ranks[rank] = of_ranks.get(rank, {}) | entries
        return {name: torch.cat([of_ranks[rank][name] for rank in sorted(of_ranks)]) for name in of_ranks[0]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the rows back; each rank finds its part of them at the next step."""
        self._restored = dict(state)

    def _own_part(self, context: StepContext, whole: Mapping[str, Tensor]) -> list[Batch]:
        sizes = [len(batch["input_ids"]) for batch in context.batches]
        if len(next(iter(whole.values()))) != sum(sizes) * self._build.layout.data_parallel:
            return []
        first = self._first_row(context, sum(sizes))
        own = {name: entry[first : first + sum(sizes)].to(self._build.device) for name, entry in whole.items()}
        parts = {name: entry.split(sizes) for name, entry in own.items()}
        return [{name: part[number] for name, part in parts.items()} for number in range(len(sizes))]


def _equal(rewards: Tensor) -> Tensor:
    """(P,) bool, from (P, G): whether all completions of a group have one reward."""
    return rewards.amax(1) == rewards.amin(1)
