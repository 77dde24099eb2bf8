"""Contract of every router, as tests. Shapes: B sequences, S positions, D width, E experts, K experts of a token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from forge_core.contracts.components import RouterComponent
from forge_core.contracts.data import Batch
from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import Model
from forge_core.parallel.initialise import check_finite, materialise
from forge_testing.pretend import NAME, on_device
from forge_testing.pretend.clocks import clocks
from forge_testing.suites.base import Suite, explained, undeclared_waits

TOKENS = (2, 12)
"""Sequences and positions."""


class RouterSuite(Suite):
    """Shapes, experts in range, finite weights, determinism, independence of the micro-batch, and initial values.

    class TestTopK(RouterSuite):
        component = TopK(top_k=2)
    """

    component: ClassVar[RouterComponent]
    dim: ClassVar[int] = 16
    experts: ClassVar[int] = 8
    waits: ClassVar[Mapping[str, int]] = {}
    """How often the host waits for the device forward and backward, by the file of the code that does."""

    def test_it_is_a_module_on_the_meta_device(self, tmp_path: Path) -> None:
        """Like every part of a model: the engine allocates memory and sets values later."""
        router = self._build(tmp_path)
        assert isinstance(router, nn.Module), f"build returned a {type(router).__name__}; a router is a torch.nn.Module"
        placed = [name for name, tensor in router.state_dict().items() if tensor.device.type != "meta"]
        assert not placed, f"{placed[0]} has memory; make parameters with torch.empty(…) and no device"

    def test_its_initial_values_are_its_own(self, tmp_path: Path) -> None:
        """Every tensor is filled, and none depends on torch's default generator."""
        first, second = self._ready(tmp_path, seed=1), self._ready(tmp_path, seed=2)
        for name, tensor in first.state_dict().items():
            same = torch.equal(tensor, second.state_dict()[name])
            assert same, f"the initial values of {name} depend on the default generator; draw them with `fill`"

    def test_each_token_gets_weights_and_numbers_of_experts(self, tmp_path: Path) -> None:
        """Weights and numbers have one shape; weights are finite, and numbers refer to existing experts."""
        router = self._ready(tmp_path)
        weights, experts = self._routed(router, *self._tokens())
        shapes = f"weights {tuple(weights.shape)} and numbers {tuple(experts.shape)} for tokens {TOKENS}"
        assert weights.shape == experts.shape, f"{shapes}; both are (sequences, positions, experts of a token)"
        assert weights.shape[:2] == TOKENS, f"{shapes}; both are (sequences, positions, experts of a token)"
        assert weights.ndim == 3, f"{shapes}; both are (sequences, positions, experts of a token)"
        wide = weights.dtype == torch.promote_types(weights.dtype, torch.float32)
        assert wide, f"weights are {weights.dtype}; compute them in float32 or wider"
        assert bool(torch.isfinite(weights).all()), "some weights are not finite"
        assert not experts.dtype.is_floating_point, f"numbers of experts are {experts.dtype}; give integers"
        low, high = experts.min().item(), experts.max().item()
        least = -1 if getattr(router, "leaves_out", False) else 0
        inside = low >= least and high < self.experts
        hint = "" if least else "; to give -1 for none, set `leaves_out = True` on the module"
        assert inside, f"numbers of experts from {low} to {high}; there are experts 0 to {self.experts - 1}{hint}"

    def test_weights_are_used_in_the_dtype_of_the_tokens(self, tmp_path: Path) -> None:
        """Rounding the weights to bf16 beforehand changes nothing for tokens in bf16.

        FSDP gathers them rounded and one process does not, so experts would otherwise be chosen by other scores.
        """
        router, (x, batch) = self._ready(tmp_path).float(), self._tokens()
        router.eval()
        with torch.no_grad():
            weights, experts = self._routed(router, x.bfloat16(), batch)
            for parameter in router.parameters():
                parameter.copy_(parameter.bfloat16())
            rounded, chosen = self._routed(router, x.bfloat16(), batch)
        assert _equal((weights, experts), (rounded, chosen)), (
            "weights rounded to bf16 change the scores of tokens in bf16; use `weight.to(x.dtype).to(torch.float32)`, "
            "or fsdp chooses other experts than one process"
        )

    def test_it_says_how_many_experts_a_token_has(self, tmp_path: Path) -> None:
        """`experts_per_token`, from which the FLOPs of a model are counted, is the measured mean."""
        router = self._ready(tmp_path)
        _, experts = self._routed(router, *self._tokens())
        measured = (experts >= 0).sum().item() / experts[..., 0].numel()
        declared = getattr(router, "experts_per_token", None)
        assert declared is not None, f"the module has no `experts_per_token`; set it ({measured:g} here)"
        assert abs(declared - measured) < 1e-6, (
            f"`experts_per_token` is {declared:g}, but tokens have {measured:g} in the mean"
        )

    def test_it_says_the_same_again(self, tmp_path: Path) -> None:
        """In training mode with the same state of the default generator; in evaluation mode, without noise, always."""
        router, tokens = self._ready(tmp_path), self._tokens()
        for training in (False, True):
            torch.manual_seed(0)
            router.train(training)
            first = self._routed(router, *tokens)
            torch.manual_seed(0 if training else 1)
            name, hint = ("training", "") if training else ("evaluation", ", and draw noise in training only")
            assert _equal(first, self._routed(router, *tokens)), (
                f"asked twice in {name} mode, it returns different results; keep nothing from call to call{hint}"
            )

    def test_a_sequence_is_routed_by_itself(self, tmp_path: Path) -> None:
        """The result depends neither on other sequences of the micro-batch nor on the row, as the layout sets these.

        In training mode too, unless it draws noise.
        """
        router, (x, batch) = self._ready(tmp_path), self._tokens()
        for training in (False, True):
            router.train(training)
            whole = self._routed(router, x, batch)
            if training and not _equal(whole, self._routed(router, x, batch)):
                continue  # noise is drawn for a whole micro-batch
            for rows, what in (([1, 0], "in another row"), ([0], "without the other sequences")):
                part = self._routed(router, x[rows], {name: value[rows] for name, value in batch.items()})
                near = torch.allclose(part[0], whole[0][rows], rtol=1e-4, atol=1e-6)
                same = near and torch.equal(part[1], whole[1][rows])
                assert same, (
                    f"a sequence {what} of the micro-batch is routed differently; a value that depends on several "
                    "tokens must depend only on the tokens of their sequence, or the curve depends on the layout"
                )

    def test_gradients_reach_it(self, tmp_path: Path) -> None:
        """The weights are differentiable, and every parameter has a gradient by them or by a loss that is attached."""
        router, (x, batch) = self._ready(tmp_path), self._tokens()
        if not any(parameter.requires_grad for parameter in router.parameters()):
            return
        weights, _ = self._routed(router, x.requires_grad_(), batch)
        assert weights.requires_grad, "the weights are not differentiable; compute them from its parameters"
        weights.double().square().sum().backward()
        for name, parameter in router.named_parameters():
            assert parameter.grad is not None, f"no gradient reaches {name}"
            assert bool(torch.isfinite(parameter.grad).all()), f"the gradient of {name} is not finite"

    def test_it_routes_on_a_device_and_waits_only_where_it_says(self, tmp_path: Path) -> None:
        """On the device of `forge_testing.pretend`, results are the CPU's, and waits are counted by file and line."""
        weights, experts, waits = on_device(type(self).routed_on_device, str(tmp_path))
        expected = self._routed_and_back(self._ready(tmp_path), self._tokens())
        same = torch.allclose(weights, expected[0], rtol=1e-5, atol=1e-6) and torch.equal(experts, expected[1])
        assert same, f"{type(self).__name__} routes differently on a device than on the CPU"
        wrong = undeclared_waits(f"a call of {type(self).__name__}", waits, self.waits)
        assert not wrong, wrong

    @classmethod
    def routed_on_device(cls, folder: str) -> tuple[Tensor, Tensor, Mapping[tuple[str, str], int]]:
        """In a process with the pretended device: weights and experts of the second call, and its waits."""
        suite = cls()
        router, (x, batch) = suite._ready(Path(folder), device=NAME), suite._tokens()
        tokens = x.to(NAME), {name: value.to(NAME) for name, value in batch.items()}
        suite._routed_and_back(router, tokens)  # a first call may fill caches
        clocks.waits.clear()
        weights, experts = suite._routed_and_back(router, tokens)
        waits = dict(clocks.waits)
        return weights.cpu(), experts.cpu(), waits

    def _routed_and_back(self, router: nn.Module, tokens: tuple[Tensor, Batch]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        weights, experts = self._routed(router, tokens[0].requires_grad_(), tokens[1])
        if weights.requires_grad:
            weights.double().square().sum().backward()
        return weights.detach(), experts

    def _build(self, folder: Path, device: str = "cpu") -> nn.Module:
        context = self.context(self.tiny_job(folder, device=device)).at("layers.0.router", layer=0)
        # As within a training step, where the losses that it attaches count: parameters may learn by these alone.
        tokens = torch.tensor(math.prod(TOKENS), device=device)
        context.auxiliary.begin_step(tokens, sequences=TOKENS[0], micro_batches=1)
        with torch.device("meta"):
            return context.build(self.make(folder), dim=self.dim, experts=self.experts)

    def _ready(self, folder: Path, seed: int = 0, device: str = "cpu") -> nn.Module:
        router = self._build(folder, device)
        torch.manual_seed(seed)
        model = cast(Model, router)
        try:
            materialise(model, torch.device(device), seed=1)
            check_finite(model)
        except ForgeError as error:
            raise AssertionError(str(error)) from error
        return router

    def _tokens(self) -> tuple[Tensor, Batch]:
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(32, TOKENS, generator=generator)
        return torch.randn(*TOKENS, self.dim, generator=generator), {"input_ids": ids, "labels": ids}

    def _routed(self, router: nn.Module, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        with explained(f"it fails on tokens of shape {tuple(x.shape)}"):
            result: Any = router(x, batch)
        pair = isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, Tensor) for part in result)
        assert pair, (
            f"the router returned {type(result).__name__}; it returns two tensors: weights, and numbers of experts"
        )
        return result


def _equal(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))
