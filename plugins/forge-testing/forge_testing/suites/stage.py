"""Contract of every stage, as tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from torch import nn

from forge_core.contracts.components import ModelComponent, ParallelComponent
from forge_core.contracts.layout import DIMENSIONS, Layout
from forge_core.engine.build import build_bare_model, stages_of
from forge_core.job import Job
from forge_core.parallel.stages import check_contract
from forge_core.plugins.manager import RunContext
from forge_testing import Numbers, SplittableModel
from forge_testing.curves import Curve, Difference, train
from forge_testing.processes import run_on_ranks
from forge_testing.suites.base import Suite, explained


class StageSuite(Suite):
    """Parameters keep their names, and a run has the same numbers as without the stage.

        class TestTensorParallel(StageSuite):
            component = TensorParallel(degree=2)
            ranks = 2

    A suite of a stage that rounds differently sets `precision` and wider tolerances.
    """

    component: ClassVar[ParallelComponent]
    ranks: ClassVar[int] = 1
    """Processes to test it on."""
    model: ClassVar[ModelComponent] = SplittableModel()
    """A model with the protocols that the stage needs, and a vocabulary of at least 32."""
    micro_batch_size: ClassVar[int] = 0
    """Sequences of a micro-batch, of 8 a step; 0: a rank's whole share."""
    precision: ClassVar[str] = "fp64"
    loss_tolerance: ClassVar[float] = 1e-9
    """Largest difference of losses, gradient norms, gradients and evaluation; metrics above 1 relative to them."""
    weights_tolerance: ClassVar[float] = 1e-7
    """Largest distance of the weights, relative to their change over the steps."""

    def test_its_relations_have_reasons(self) -> None:
        """`after` and `before` map types of stages to reasons, which the run's summary prints."""
        component = self.make(Path())
        for relation in ("after", "before"):
            for type_, reason in getattr(component, relation).items():
                assert isinstance(reason, str), f"{relation}[{type_!r}] is not a text with the reason"
                assert reason.strip(), f"{relation}[{type_!r}] has no reason; the summary prints it"
        both = component.after.keys() & component.before.keys()
        assert not both, f"it is to come both after and before {', '.join(sorted(both))}"

    def test_its_degrees_are_of_the_mesh(self) -> None:
        """Degrees name existing dimensions, with sizes of at least 1 or `auto`."""
        component = self.make(Path())
        allowed = [dimension.name for dimension in (*DIMENSIONS, *component.dimensions)]
        for dimension, size in component.degrees().items():
            hint = "declare it in `dimensions`"
            assert dimension in allowed, f"degrees has {dimension!r}; the mesh has {', '.join(allowed)}; {hint}"
            good = size == "auto" or (isinstance(size, int) and size >= 1)
            assert good, f'degrees has the size {size!r} for {dimension}; it is a number from 1, or "auto"'

    def test_it_refuses_layers_that_mix_positions_undeclared(self, tmp_path: Path) -> None:
        """A stage whose ranks share sequences: such a layer would see the positions of one rank, in silence."""
        component = self.make(tmp_path)
        shared = {dimension.name for dimension in (*DIMENSIONS, *component.dimensions) if dimension.tokens}
        degrees: dict[str, Any] = {
            name: size for name, size in component.degrees().items() if name in shared and isinstance(size, int)
        }
        if max(degrees.values(), default=1) == 1:
            pytest.skip("its ranks do not share sequences")
        job = self._job(tmp_path, parallel=False)
        model: Any = build_bare_model(job, self.context(job))[0]
        layer = model.layers["0"]
        forward = layer.forward
        layer.forward = lambda carry, batch: tuple(tensor.cumsum(1) for tensor in forward(carry, batch))
        assert list(component.model_problems(model, Layout(component.dimensions, **degrees))), (
            "model_problems accepts a layer in which positions depend on each other and that does not say so; call "
            "forge_kit.nn.position_probe.undeclared_mixer(model)"
        )

    def test_it_keeps_the_names_of_parameters(self, tmp_path: Path) -> None:
        """Optimizers, checkpoints and initial values identify parameters by name.

        Ranks that hold different layers have all of them together.
        """
        ranks = [names for names, _ in self._found(tmp_path)]
        whole = set(ranks[0].before)
        for rank, names in enumerate(ranks):
            new = sorted(set(names.after) - whole)
            assert not new, f"rank {rank} has parameters that the bare model has not: {', '.join(new[:3])}"
        lost = sorted(whole - {name for names in ranks for name in names.after})
        assert not lost, f"no rank has {', '.join(lost[:3])} any more"
        for rank, names in enumerate(ranks):
            lacking = [] if self.make(tmp_path).drops_parameters else sorted(whole - set(names.after))
            hint = "a stage that leaves each rank some of them sets `drops_parameters`"
            assert not lacking, f"rank {rank} lacks {', '.join(lacking[:3])}; {hint}"
            description = names.described
            assert isinstance(description, str), (
                f"describe() returns a {type(description).__name__}; it is a text for the summary"
            )

    def test_a_run_comes_to_the_same_as_without_it(self, tmp_path: Path) -> None:
        """Loss, gradient norm, gradients, weights and evaluation are equal, from the same initial weights."""
        expected = self._trained(self._job(tmp_path, parallel=False))
        results = [curve for _, curve in self._found(tmp_path)]
        if isinstance(results[0], AssertionError):
            raise AssertionError(str(results[0])) from results[0]
        difference = Difference.between(results[0], expected)
        assert difference.initial == 0, (
            f"initial values differ by {difference.initial:.3g} from the values of a run without it; they are drawn "
            "after the stages, by the parameters' names and shapes, which must match the whole parameters"
        )
        near = max(difference.loss, difference.norm, difference.gradient, difference.evaluation)
        good = near <= self.loss_tolerance and difference.weights <= self.weights_tolerance
        assert good, (
            f"a run with it differs from one without by {difference}; allowed are {self.loss_tolerance:g} and for "
            f"weights {self.weights_tolerance:g}. What a rank computes a part of must be summed over the ranks that "
            "share it, once"
        )
        for rank, other in enumerate(results):
            same = (other.losses, other.norms) == (results[0].losses, results[0].norms)
            assert same, f"ranks 0 and {rank} report different losses or gradient norms; they must agree on them"

    # --- surroundings --------------------------------------------------------------------------------------------

    def _job(self, folder: Path, parallel: bool = True) -> Job:
        changes: dict[str, Any] = {"model": self.model, "precision": self.precision, "global_batch_size": 8}
        changes |= {"data": {"sources": (Numbers(ignored=7, held_out=5),)}, "seq_len": 16, "steps": 5}
        if parallel:
            component = self.make(folder)
            name = self.catalog.type_of(type(component)).rpartition("/")[2].rpartition(":")[2]
            changes |= {"parallel": {name: component}, "micro_batch_size": self.micro_batch_size}
        return self.tiny_job(folder, **changes)

    def _found(self, folder: Path) -> list[tuple[Names, Any]]:
        """Return for each rank the names, and the curve or the error. The ranks are started once."""
        cls = type(self)
        if "_ranks" not in vars(cls):
            job = self._job(folder)
            try:
                cls._ranks = self._on_ranks(lambda rank: (self._names(job), self._trained(job)))
            except AssertionError as error:
                failed = error  # the name of an exception ends with its clause
                cls._ranks = self._on_ranks(lambda rank: (self._names(job), failed))
        return cls._ranks

    _ranks: ClassVar[list[tuple[Names, Any]]]

    def _on_ranks(self, function: Callable[[int], Any]) -> list[Any]:
        with explained(f"it fails on {self.ranks} rank{'s' if self.ranks > 1 else ''}"):
            return run_on_ranks(self.ranks, function)

    def _trained(self, job: Job) -> Curve:
        return train(job, self.catalog)

    def _names(self, job: Job) -> Names:
        context: RunContext = self.context(job)
        model, _ = build_bare_model(job, context)
        before = [name for name, _ in model.named_parameters()]
        described: Any = ""
        for stage in stages_of(job, context):
            built = context.build(stage.component)
            check_contract(built, f"parallel.{stage.name}")
            model = built.apply(model)
            assert isinstance(model, nn.Module), f"apply returned a {type(model).__name__}; return the model"
            if stage.component in job.parallel.values():
                described = built.describe()
        return Names(before, [name for name, _ in model.named_parameters()], described)


class Names(NamedTuple):
    """Names of parameters before and after, and the description of the stage."""

    before: list[str]
    after: list[str]
    described: Any
