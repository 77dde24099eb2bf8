"""The hook that keeps a group in step with the others: quorum, healing, and the decision on each update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field

from forge_core.contracts.components import TrainingHook

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_plugin_torchft.session import Session


@define(kw_only=True, slots=False)
class Groups(TrainingHook):
    """Joins the other groups before each step, and takes the state of a living one where this group is behind."""

    may_skip: ClassVar[bool] = True

    settings: Any = field(repr=False)
    """The `TorchFT` stage of the job."""
    commits: int = field(default=0, init=False)
    """Updates that the groups have agreed on. Steps do not show a group that is behind: one left out counts, too."""

    @property
    def session(self) -> Session:
        """The connection of this process, which the stage makes and shares with its hooks."""
        session: Session = self.settings.session
        return session

    def on_train_begin(self, context: TrainContext) -> None:
        """Connect; join the others too, unless groups meet at the end of rounds: then `outer.Outer` joins."""
        self.session.open(context)
        if self.session.every_step:
            self.join(context)

    def on_step_begin(self, context: StepContext) -> None:
        """Let the sums of this step be sums over groups, until its gradients are complete."""
        self.session.begin_step()

    def on_gradients(self, context: StepContext) -> None:
        """Agree on the update, which all groups that take part make, or none."""
        session = self.session
        session.in_step = False
        if not session.every_step:  # groups meet at the end of a round: see `outer.Outer`
            return
        if session.commit():
            self.commits += 1
        else:
            context.skip_update("a group was lost in this step")
        for name, value in session.facts_of_step().items():
            context.log(name, value)

    def on_step_end(self, context: StepContext) -> None:
        """Compare weights if due; then join the others for the next step, or leave if this group is to stop."""
        if not self.session.every_step or context.step >= context.job.train.steps:
            return
        every = self.settings.check_every
        if every and context.step % every == 0 and not context.skipped:
            self.session.compare_weights(context.model)
        if self.session.anywhere(bool(context.requests.stop)):
            self.session.close()  # before the save: the others would wait for it
        else:
            self.join(context)

    def on_train_end(self, context: TrainContext) -> None:
        self.session.close()

    def on_exception(self, context: TrainContext, error: BaseException) -> None:
        """Leave at once: the others would wait for this group until `timeout_s`."""
        self.session.close()

    def join(self, context: TrainContext) -> None:
        """Agree with the other groups on who takes part in what comes next; a state received is put in place."""
        # Between steps and not within one: there `put_state` acts, with progress and data, so that a group that comes
        # back makes the next step like any other.
        state = self.session.quorum(self.commits, context)
        if state is not None:
            context.put_state(state)
