"""Contract of every optimizer, as tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn

from forge_core.contracts.components import OptimizerComponent, SchedulerComponent
from forge_core.contracts.contexts import BuildContext
from forge_core.contracts.model import Role
from forge_core.contracts.optimizer import NamedParameter, NamedParameters, Schedule
from forge_core.engine.groups import check_groups
from forge_testing import TinyModel
from forge_testing.outcomes import Stop, losses_of, some, state_differences
from forge_testing.suites.base import explained
from forge_testing.suites.parity import ParitySuite

SHAPES: Mapping[str, tuple[Role, tuple[int, ...]]] = {
    "embedding.weight": ("embedding", (12, 8)),
    "layers.0.wide.weight": ("matrix", (8, 16)),
    "layers.0.tall.weight": ("matrix", (16, 8)),
    "layers.0.tall.bias": ("bias", (16,)),
    "norm.weight": ("norm", (8,)),
    "head.weight": ("head", (12, 8)),
}
"""Parameters of the quadratic."""


@frozen(kw_only=True)
class Falling(SchedulerComponent):
    """Linear decay from the base rate to half of it."""

    def build(self, context: BuildContext) -> Schedule:
        return lambda step, total: 1 - step / (2 * total)


class OptimizerSuite(ParitySuite):
    """Descent, state, groups, missing gradients, freezing, and one curve under every layout.

        class TestLion(OptimizerSuite):
            component = Lion(lr=1e-3)

    Choose a rate with which some dozens of steps make a difference. If the component computes in a precision in which
    layouts differ by more than 1e-9, such as bf16, set `parity_component` to one that computes in float32 or wider.
    """

    component: ClassVar[OptimizerComponent]
    parity_component: ClassVar[OptimizerComponent | None] = None
    """Component to compare across layouts, if not `component`."""
    steps: ClassVar[int] = 40
    """Updates after which the loss must have fallen, and each parameter of a quadratic be closer to its target."""

    moves_at_rate_zero: ClassVar[bool] = False
    """Whether weights may move at a rate of 0, as if they are pulled towards an average of earlier ones."""

    # --- descent -------------------------------------------------------------------------------------------------

    def test_every_parameter_descends_a_quadratic(self, tmp_path: Path) -> None:
        """Each parameter, in every role, moves towards the minimum of the loss."""
        problem = Quadratic(self, tmp_path)
        before = problem.distances()
        for _ in range(self.steps):
            problem.set_gradients()
            problem.optimizer.step()
        after = problem.distances()
        worse = [
            f"{name} ({before[name]:.4g} -> {after[name]:.4g})" for name in before if not after[name] < before[name]
        ]
        assert not worse, (
            f"after {self.steps} updates on a quadratic, these are no closer to its minimum: {some(worse)}; they must "
            "be stepped, against the gradient, with a rate that is neither too low nor too high (give the suite "
            "another `component` or `steps`)"
        )

    def test_it_descends_a_language_model(self, tmp_path: Path) -> None:
        """A tiny language model's loss falls, in a whole run."""
        losses = losses_of(self.train(self._job(tmp_path, steps=self.steps)))
        first, last = sum(losses[:4]) / 4, sum(losses[-4:]) / 4
        assert last < first, (
            f"the loss of a tiny language model went from {first:.4f} to {last:.4f} in {self.steps} updates and must "
            "fall; see that the update goes against the gradient, and give the suite a fitting rate"
        )

    # --- state ---------------------------------------------------------------------------------------------------

    def test_a_run_that_continues_equals_one_that_was_not_interrupted(self, tmp_path: Path) -> None:
        """Losses, weights and state, to the bit; also where every step is saved. In float32 and in bfloat16."""
        for precision in ("fp32", "bf16"):
            # A falling rate: with a constant one, losing the largest rate so far would have no effect.
            settings = {"steps": 6, "scheduler": Falling(), "precision": precision}
            saved_often = {"interval": 1, "keep": 1}
            cut = f"parts-{precision}"
            whole = self.train(self._job(tmp_path, name=f"whole-{precision}", **settings))
            self.train(self._job(tmp_path, name=cut, **settings, checkpoint=saved_often), Stop(step=3))
            parts = self.train(self._job(tmp_path, name=cut, **settings, checkpoint=saved_often))
            differ = state_differences(parts, whole)
            assert losses_of(parts) == losses_of(whole), (
                f"a run in {precision} that stopped after step 3 and continued has the losses {losses_of(parts)}, one "
                f"that did not stop {losses_of(whole)}; {STATE}"
                + (f" (not the same at the end: {some(differ)})" if differ else "")
            )
            assert not differ, (
                f"a run in {precision} that stopped and continued ends with other values of {some(differ)}; {STATE}"
            )

    # --- groups --------------------------------------------------------------------------------------------------

    def test_every_parameter_is_in_one_group(self, tmp_path: Path) -> None:
        """Including frozen ones. Each group has `lr`, and the names of its parameters, by which state is saved."""
        parameters, optimizer = self._on_a_model(tmp_path, frozen="layers.0")
        with explained("the optimizer's groups are not complete"):
            check_groups(optimizer.param_groups, parameters)
        names = {id(item.parameter): item.name for item in parameters}
        for number, group in enumerate(optimizer.param_groups):
            assert "lr" in group, f"group {number} has no `lr`, which the engine multiplies by the schedule"
            expected = [names.get(id(parameter), "a stranger") for parameter in group["params"]]
            assert group.get("names") == expected, (
                f"group {number} has `names` {group.get('names')} for the parameters {expected}; make groups with "
                "parameters.groups(…), or give each a list `names` in the order of `params`"
            )

    def test_zero_grad_reaches_every_parameter(self, tmp_path: Path) -> None:
        """Including the parameters of an inner optimizer."""
        parameters, optimizer = self._on_a_model(tmp_path)
        for item in parameters:
            item.parameter.grad = torch.ones_like(item.parameter, dtype=item.parameter.grad_dtype)
        optimizer.zero_grad(set_to_none=True)
        left = [item.name for item in parameters if item.parameter.grad is not None]
        assert not left, f"zero_grad(set_to_none=True) leaves the gradients of {some(left)}, which would add up forever"

    def test_the_rate_is_read_from_the_groups(self, tmp_path: Path) -> None:
        """The engine writes base rate x schedule into `lr` before each update; at 0, no weight moves."""
        if self.moves_at_rate_zero:
            pytest.skip("its weights may move at a rate of 0")
        problem = Quadratic(self, tmp_path)
        problem.set_gradients()
        problem.optimizer.step()
        before = problem.weights()
        for group in problem.optimizer.param_groups:
            group["lr"] = 0.0
        problem.set_gradients()
        problem.optimizer.step()
        moved = problem.moved_since(before)
        assert not moved, f"with `lr` = 0 in every group, an update moves {some(moved)}; read the rate from the groups"

    # --- gradients that are missing ------------------------------------------------------------------------------

    def test_missing_gradients_are_passed_over(self, tmp_path: Path) -> None:
        """A parameter without a gradient does not change, not even by weight decay; nor do all if none has any."""
        problem = Quadratic(self, tmp_path)
        missing = ["layers.0.wide.weight", "norm.weight", "head.weight"]
        for without in (list(SHAPES), missing, [], missing):
            before = problem.weights()
            problem.set_gradients(without)
            with explained(f"an update fails if {some(without)} have no gradient (`grad` is None)"):
                problem.optimizer.step()
            moved = [name for name in problem.moved_since(before) if name in without]
            assert not moved, f"{some(moved)} moved without a gradient; pass over parameters whose `grad` is None"

    def test_a_frozen_parameter_stays_and_trains_once_unfrozen(self, tmp_path: Path) -> None:
        """Freezing is `requires_grad = False`, before the optimizer is built or later."""
        problem = Quadratic(self, tmp_path, frozen="layers.0.wide.weight")
        start = problem.weights()
        for _ in range(2):
            problem.set_gradients(["layers.0.wide.weight"])
            with explained("an update fails while a parameter is frozen"):
                problem.optimizer.step()
        assert "layers.0.wide.weight" not in problem.moved_since(start), (
            "a frozen parameter (requires_grad = False) moved; pass over parameters whose `grad` is None"
        )
        problem.parameters["layers.0.wide.weight"].requires_grad_(True)
        for _ in range(2):
            problem.set_gradients()
            with explained("an update fails once a frozen parameter was unfrozen"):
                problem.optimizer.step()
        assert "layers.0.wide.weight" in problem.moved_since(start), (
            "a parameter that was frozen when the optimizer was built does not train once it is unfrozen; put every "
            "parameter into a group, and look at its gradient when it is stepped"
        )

    # --- surroundings --------------------------------------------------------------------------------------------

    def parity_changes(self, folder: Path) -> Mapping[str, Any]:
        return {"optimizer": self.parity_component or self.make(folder)}

    def _job(self, folder: Path, name: str = "run", **changes: Any) -> Any:
        return self.tiny_job(folder, optimizer=self.make(folder), job={"name": name, "output": str(folder)}, **changes)

    def build(self, folder: Path, parameters: NamedParameters) -> torch.optim.Optimizer:
        """Build the optimizer of these parameters."""
        context = self.context(self._job(folder, model=TinyModel()))
        return context.build(self.make(folder), parameters=parameters)

    def _on_a_model(self, folder: Path, frozen: str = "") -> tuple[NamedParameters, torch.optim.Optimizer]:
        from forge_core.engine.build import build_model

        job = self._job(folder, model=TinyModel())
        model = build_model(job, self.context(job)).model
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or not name.startswith(frozen))
        parameters = NamedParameters.of(model)
        return parameters, self.build(folder, parameters)


STATE = (
    "all state must be tensors or plain values in optimizer.state[parameter], or counters in groups that an attribute "
    "`group_state` names; nothing else is saved"
)


class Quadratic:
    """Half the squared distance of parameters in every role from their targets."""

    def __init__(self, suite: OptimizerSuite, folder: Path, frozen: str = "") -> None:
        generator = torch.Generator().manual_seed(1)
        self._aims = {name: torch.randn(shape, generator=generator) for name, (_, shape) in SHAPES.items()}
        starts = {name: torch.randn(shape, generator=generator) for name, (_, shape) in SHAPES.items()}
        self.parameters = {name: nn.Parameter(start, name != frozen) for name, start in starts.items()}
        named = [NamedParameter(name, self.parameters[name], role) for name, (role, _) in SHAPES.items()]
        self.optimizer = suite.build(folder, NamedParameters(named))

    def set_gradients(self, without: list[str] | None = None) -> None:
        """Set the gradients of all parameters; parameters named in `without` have none."""
        for name, parameter in self.parameters.items():
            parameter.grad = None if name in (without or ()) else parameter.detach() - self._aims[name]

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def moved_since(self, before: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the parameters that changed."""
        return [name for name, parameter in self.parameters.items() if not torch.equal(parameter, before[name])]

    def distances(self) -> dict[str, float]:
        """Return the distance of each parameter from its target, with the optimizer's weights for evaluation."""
        getattr(self.optimizer, "eval", lambda: None)()
        distances = {name: (weight - self._aims[name]).norm().item() for name, weight in self.weights().items()}
        getattr(self.optimizer, "train", lambda: None)()
        return distances
