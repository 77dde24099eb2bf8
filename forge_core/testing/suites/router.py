"""What every router must do, as far as its contract goes. Shapes: N tokens, D width, E experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from forge_core.components import RouterComponent
from forge_core.errors import ForgeError
from forge_core.parallel.initialise import check_finite, materialise
from forge_core.protocols import Model
from forge_core.testing.suites.base import Suite, explained

TOKENS = 24


class RouterSuite(Suite):
    """Shapes, ids in range, finite numbers, determinism and initial values.

        class TestTopK(RouterSuite):
            component = TopK(top_k=2)

    A router is a module that assigns tokens to experts. What it takes and gives besides is a matter between it and the
    feed-forward part that calls it, so `route` says how it is called; any structure of tensors may come back.
    """

    component: ClassVar[RouterComponent]
    dim: ClassVar[int] = 16
    experts: ClassVar[int] = 8

    def route(self, router: nn.Module, tokens: Tensor) -> Any:
        """What the router says of (N, D) tokens. Integers in it are numbers of experts; if some are not, leave these
        out."""
        return router(tokens)

    def test_it_is_a_module_on_the_meta_device(self, tmp_path: Path) -> None:
        """As all of a model: memory and values come later."""
        router = self._build(tmp_path)
        assert isinstance(router, nn.Module), f"build gave a {type(router).__name__}; a router is a torch.nn.Module"
        placed = [name for name, tensor in router.state_dict().items() if tensor.device.type != "meta"]
        assert not placed, f"{placed[0]} has memory; make parameters with torch.empty(…) and no device"

    def test_its_initial_values_are_its_own(self, tmp_path: Path) -> None:
        """None is left out, and none depends on torch's default generator."""
        first, second = self._ready(tmp_path, seed=1), self._ready(tmp_path, seed=2)
        for name, tensor in first.state_dict().items():
            same = torch.equal(tensor, second.state_dict()[name])
            assert same, f"the initial values of {name} depend on the default generator; draw them with `fill`"

    def test_what_it_says_is_finite_and_of_every_token(self, tmp_path: Path) -> None:
        """The first dimension of what has any is N, and numbers of experts lie in [0, E)."""
        found = list(self._said(self._ready(tmp_path), self._tokens()))
        assert found, "the router said nothing: no tensor came back"
        for where, tensor in found:
            if tensor.ndim:
                told = f"{where} has the shape {tuple(tensor.shape)} for {TOKENS} tokens and {self.experts} experts"
                assert tensor.shape[0] in (TOKENS, self.experts), f"{told}; the first dimension is of one of these"
            if tensor.dtype.is_floating_point:
                assert bool(torch.isfinite(tensor).all()), f"{where} has values that are not finite"
            elif tensor.dtype != torch.bool and tensor.numel():
                low, high = tensor.min().item(), tensor.max().item()
                inside = low >= 0 and high < self.experts
                assert inside, f"{where} has ids from {low} to {high}; there are experts 0 to {self.experts - 1}"

    def test_it_says_the_same_again(self, tmp_path: Path) -> None:
        """In evaluation mode; and in training mode, once the default generator is where it was."""
        router, tokens = self._ready(tmp_path), self._tokens()
        for mode in (False, True):
            router.train(mode)
            answers = []
            for _ in range(2):
                torch.manual_seed(0)
                answers.append([tensor for _, tensor in self._said(router, tokens)])
            same = all(torch.equal(one, other) for one, other in zip(*answers, strict=True))
            name = "training" if mode else "evaluation"
            assert same, f"asked twice in {name} mode, it says different things; keep nothing from call to call"

    def test_gradients_reach_it(self, tmp_path: Path) -> None:
        """Some of what it says must be differentiable, or its parameters would never train."""
        router, tokens = self._ready(tmp_path), self._tokens().requires_grad_()
        if not any(parameter.requires_grad for parameter in router.parameters()):
            return
        answers = [tensor for _, tensor in self._said(router, tokens) if tensor.requires_grad]
        assert answers, "nothing that it says is differentiable; give weights that its parameters made"
        sum(tensor.double().square().sum() for tensor in answers).backward()  # type: ignore[union-attr]
        for name, parameter in router.named_parameters():
            assert parameter.grad is not None, f"no gradient reaches {name}"
            assert bool(torch.isfinite(parameter.grad).all()), f"the gradient of {name} is not finite"

    def _build(self, folder: Path) -> nn.Module:
        context = self.context(self.tiny_job(folder)).at("layers.0.router", layer=0)
        with torch.device("meta"):
            return context.build(self.make(folder), dim=self.dim, experts=self.experts)

    def _ready(self, folder: Path, seed: int = 0) -> nn.Module:
        router = self._build(folder)
        torch.manual_seed(seed)
        model = cast(Model, router)
        try:
            materialise(model, torch.device("cpu"), seed=1)
            check_finite(model)
        except ForgeError as error:
            raise AssertionError(str(error)) from error
        return router

    def _tokens(self) -> Tensor:
        return torch.randn(TOKENS, self.dim, generator=torch.Generator().manual_seed(5))

    def _said(self, router: nn.Module, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
        with explained(f"it fails on tokens of shape {tuple(tokens.shape)}"):
            said = self.route(router, tokens)
        return _tensors(said, "what it says")


def _tensors(value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{where}[{number}]")
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), where)
