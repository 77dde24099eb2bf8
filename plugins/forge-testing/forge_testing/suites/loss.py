"""Contract of every loss, as tests. Shapes: B sequences, S positions, D width, V vocabulary, N = B x S."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import functional as F

from forge_core.contracts.components import LossComponent
from forge_core.contracts.data import IGNORED_LABEL, Batch
from forge_core.contracts.runtime import LossOutput
from forge_kit.nn.modules import LinearHead
from forge_testing.suites.base import explained
from forge_testing.suites.parity import ParitySuite
from forge_testing.tiny import VOCABULARY

B, S, D = 4, 12, 8
IGNORED = ((0, slice(0, 5)), (1, slice(None)), (3, slice(7, 9)))
"""Positions of the batch whose labels are ignored: the start of one row, all of another, the middle of a third."""


class LossSuite(ParitySuite):
    """Sum and count, ignored labels, independence of micro-batches, gradients, and one curve under every layout.

        class TestSmoothed(LossSuite):
            component = Smoothed(smoothing=0.1)

            def objective(self, logits, labels):
                return 0.9 * self.reported(logits, labels) - 0.1 * logits.log_softmax(-1).mean(-1)

    The plain cross-entropy needs no `objective`.
    """

    component: ClassVar[LossComponent]
    variants: ClassVar[Sequence[LossComponent]] = ()
    """The component with other settings that must return the same numbers, such as other chunks."""
    tolerance: ClassVar[float] = 1e-5
    """Largest error of float32 results, relative to the largest value."""

    def objective(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the differentiated objective, in its plainest form. By default, `reported`.

        Args:
            logits: (N, V) float64, at the valid positions of the batch of `Case.random()`.
            labels: (N,) their labels.

        Returns:
            (N,) values, whose sum the loss must return.
        """
        return self.reported(logits, labels)

    def reported(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the reported loss, with the arguments of `objective`: by default, the cross-entropy."""
        return F.cross_entropy(logits, labels, reduction="none")

    # --- numbers -------------------------------------------------------------------------------------------------

    def test_it_gives_sum_and_count_of_the_valid_positions(self, tmp_path: Path) -> None:
        """A sum, which the engine divides by the valid tokens of the global batch: never a mean."""
        case = Case.random()
        output, valid = self._loss(tmp_path, case), case.labels != IGNORED_LABEL
        assert isinstance(output, LossOutput), f"a loss returns a LossOutput, and this one a {type(output).__name__}"
        assert output.sum.ndim == 0, f"`sum` has the shape {tuple(output.sum.shape)}; it is a scalar"
        assert output.count.ndim == 0, f"`count` has the shape {tuple(output.count.shape)}; it is a scalar"
        count = valid.sum().item()
        assert output.count.item() == count, f"`count` is {output.count.item():g}, and {count} labels are not ignored"
        expected = self._reference(case, self.objective).sum().item()
        actual = output.sum.item()
        hint = f"; its mean is {expected / count:.6g}" if abs(actual - expected / count) < 1e-3 else ""
        assert _near(actual, expected, self.tolerance), (
            f"`sum` is {actual:.6g}, and the objective of the {count} valid positions adds up to {expected:.6g}{hint}. "
            "Give the sum, or if the objective is no cross-entropy, write it as `objective` of the suite"
        )

    def test_sums_of_sequences_add_up_to_what_is_reported(self, tmp_path: Path) -> None:
        """`per_sequence`: detached sums and counts of each sequence, from which per-source losses are computed."""
        case = Case.random()
        sums, counts = self._loss(tmp_path, case).per_sequence
        for name, tensor in (("sums", sums), ("counts", counts)):
            assert tensor.shape == (B,), f"per_sequence has {name} of shape {tuple(tensor.shape)}, for {B} sequences"
            assert not tensor.requires_grad, f"the {name} of per_sequence are not detached"
        valid = case.labels != IGNORED_LABEL
        expected = torch.zeros(B, S, dtype=torch.float64).masked_scatter(valid, self._reference(case, self.reported))
        _close(sums, expected.sum(-1), self.tolerance, "the sums of per_sequence")
        _close(counts, valid.sum(-1), 0, "the counts of per_sequence")

    def test_ignored_positions_do_not_matter(self, tmp_path: Path) -> None:
        """Hidden states there change neither the sum nor any gradient."""
        case = Case.random()
        other = Case.random()
        ignored = case.labels == IGNORED_LABEL
        other.hidden.data[ignored] = 7 * other.hidden.detach()[ignored] + 1
        actual, expected = self._loss(tmp_path, other), self._loss(tmp_path, case)
        change = abs(actual.sum.item() - expected.sum.item())
        assert _near(actual.sum.item(), expected.sum.item(), self.tolerance), (
            f"the sum changes by {change:.3g} with the hidden states of positions whose label is {IGNORED_LABEL}; "
            "leave these out of it"
        )
        actual.sum.backward()
        assert other.hidden.grad is not None, "no gradient reaches the hidden states; `sum` must be differentiable"
        wrong = other.hidden.grad[ignored].abs().max().item()
        assert wrong == 0, f"ignored positions get gradients of up to {wrong:.3g}; they must be exactly 0"

    def test_a_batch_without_valid_labels_gives_zero_and_zero_gradients(self, tmp_path: Path) -> None:
        """A rank may have such a batch, and takes part in the backward pass nevertheless."""
        case = Case.random()
        case.labels.fill_(IGNORED_LABEL)
        output = self._loss(tmp_path, case)
        actual = (output.sum.item(), output.count.item())
        assert actual == (0, 0), f"with all labels ignored, sum and count are {actual}, and must be 0; do not divide"
        with explained("with all labels ignored, `sum` cannot be differentiated; make it of the logits"):
            output.sum.backward()
        for name, tensor in (("hidden states", case.hidden), ("head", case.head.weight)):
            zero = tensor.grad is not None and bool((tensor.grad == 0).all())
            assert zero, (
                f"with all labels ignored, the gradient of the {name} is {_largest(tensor.grad)}, and must be 0"
            )

    def test_it_does_not_depend_on_micro_batches(self, tmp_path: Path) -> None:
        """Sums, counts and gradients of single sequences add up to the values of the whole batch."""
        case, apart = Case.random(), Case.random()
        whole = self._loss(tmp_path, case)
        whole.sum.backward()
        outputs = [self._loss(tmp_path, apart, rows=slice(row, row + 1)) for row in range(B)]
        for output in outputs:
            output.sum.backward()
        hint = "; it must be a sum over separate positions"
        _close(
            sum(o.sum.detach() for o in outputs), whole.sum, self.tolerance, "the sum, one sequence at a time" + hint
        )
        _close(torch.cat([o.per_sequence[0] for o in outputs]), whole.per_sequence[0], self.tolerance, "per_sequence")
        _close(apart.head.weight.grad, case.head.weight.grad, self.tolerance, "the head's gradient, added up" + hint)

    def test_variants_give_the_same(self, tmp_path: Path) -> None:
        """Settings in `variants`, such as other chunks, return the same numbers."""
        case = Case.random()
        expected = self._loss(tmp_path, case)
        expected.sum.backward()
        for variant in self.variants:
            other = Case.random()
            output = self._loss(tmp_path, other, component=variant)
            output.sum.backward()
            _close(output.sum, expected.sum, self.tolerance, f"the sum of {variant}")
            _close(other.hidden.grad, case.hidden.grad, self.tolerance, f"the hidden states' gradient of {variant}")
            _close(other.head.weight.grad, case.head.weight.grad, self.tolerance, f"the head's gradient of {variant}")

    # --- gradients -----------------------------------------------------------------------------------------------

    def test_gradients_are_those_of_the_objective_in_float64(self, tmp_path: Path) -> None:
        """Gradients of hidden states and head in float32 equal autograd's gradients of the plain objective."""
        case, wide = Case.random(), Case.random()
        (3.0 * self._loss(tmp_path, case).sum).backward()
        hidden, weight = (t.detach().double().requires_grad_() for t in (wide.hidden, wide.head.weight))
        valid = wide.labels != IGNORED_LABEL
        (3.0 * self.objective((hidden @ weight.T)[valid], wide.labels[valid]).sum()).backward()
        _close(case.hidden.grad, hidden.grad, self.tolerance, "the gradient of the hidden states")
        _close(case.head.weight.grad, weight.grad, self.tolerance, "the gradient of the head")

    def test_results_are_wide(self, tmp_path: Path) -> None:
        """Sums are float32 for hidden states in bf16, and float64 for hidden states in float64."""
        for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
            case = Case.random(dtype)
            output = self._loss(tmp_path, case, precision={torch.bfloat16: "bf16", torch.float64: "fp64"}.get(dtype))
            for name, tensor in (("sum", output.sum), ("per_sequence", output.per_sequence[0])):
                assert tensor.dtype == wide, (
                    f"with hidden states in {dtype}, `{name}` is {tensor.dtype}; it must be {wide}"
                )
            with explained(f"with hidden states in {dtype}, the backward pass fails"):
                output.sum.backward()

    def test_it_evaluates_without_gradients(self, tmp_path: Path) -> None:
        """The numbers under `no_grad` are the same."""
        case = Case.random()
        expected = self._loss(tmp_path, case).sum.item()
        with torch.no_grad(), explained("it fails under torch.no_grad()"):
            actual = self._loss(tmp_path, case).sum.item()
        assert _near(actual, expected, self.tolerance), f"under no_grad, `sum` is {actual:.6g} and not {expected:.6g}"

    # --- surroundings --------------------------------------------------------------------------------------------

    def parity_changes(self, folder: Path) -> Mapping[str, Any]:
        return {"loss": self.make(folder)}

    def _loss(
        self,
        folder: Path,
        case: Case,
        rows: slice = slice(None),
        component: LossComponent | None = None,
        precision: str | None = None,
    ) -> LossOutput:
        job = self.tiny_job(folder, loss=component or self.make(folder), precision=precision or "fp32")
        loss = self.context(job).build(job.loss)
        return loss(case.head, case.hidden[rows], {name: tensor[rows] for name, tensor in case.batch.items()})

    def _reference(self, case: Case, values: Any) -> Tensor:
        valid = case.labels != IGNORED_LABEL
        logits = case.hidden.detach().double() @ case.head.weight.detach().double().T
        return values(logits[valid], case.labels[valid])


@frozen
class Case:
    """A head, hidden states and a batch; always the same numbers."""

    head: LinearHead
    hidden: Tensor
    batch: Batch = field()

    @property
    def labels(self) -> Tensor:
        return self.batch["labels"]

    @classmethod
    def random(cls, dtype: torch.dtype = torch.float32) -> Case:
        generator = torch.Generator().manual_seed(3)
        head = LinearHead(D, VOCABULARY)
        weights = torch.randn(VOCABULARY, D, generator=generator)
        head.weight = torch.nn.Parameter(weights.double() if dtype == torch.float64 else weights)
        hidden = torch.randn(B, S, D, generator=generator).to(dtype).requires_grad_()
        labels = torch.randint(VOCABULARY, (B, S), generator=generator)
        inputs = labels.roll(1, dims=1)
        for row, positions in IGNORED:
            labels[row, positions] = IGNORED_LABEL
        return cls(head, hidden, {"input_ids": inputs, "labels": labels})


def _near(actual: float, expected: float, tolerance: float) -> bool:
    return abs(actual - expected) <= tolerance * max(1.0, abs(expected))


def _close(actual: Any, expected: Any, tolerance: float, what: str) -> None:
    assert actual is not None, f"{what}: there is none"
    scale = max(1e-30, expected.detach().abs().max().item())
    error = (actual.detach().double() - expected.detach().double()).abs().max().item()
    assert error <= tolerance * scale, f"{what}: off by {error:.3g}, where the largest value is {scale:.3g}"


def _largest(gradient: Tensor | None) -> str:
    return "missing" if gradient is None else f"up to {gradient.abs().max().item():.3g}"
