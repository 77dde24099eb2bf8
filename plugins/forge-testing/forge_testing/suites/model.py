"""Contract of every model, as tests. Shapes: B sequences, S positions, D width, V vocabulary."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from forge_core.contracts.components import ModelComponent
from forge_core.contracts.data import Batch
from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import Head, Model
from forge_core.contracts.optimizer import roles_of
from forge_core.engine.build import build_bare_model
from forge_core.parallel.initialise import check_finite, materialise
from forge_kit.nn.batches import zero_batch
from forge_kit.nn.generation import Generates
from forge_kit.nn.taps import tap_points
from forge_testing.layouts import LAYOUTS
from forge_testing.suites.base import explained
from forge_testing.suites.parity import ParitySuite
from forge_testing.tap_points import DIMENSIONS, seen_at_points, used_at

B, S = 2, 8


class ModelSuite(ParitySuite):
    """Protocols, initial values, documents, cache, and one curve under every layout whose protocol the model has.

        class TestTransformer(ModelSuite):
            component = Transformer(vocab_size=32, dim=16, layers=2)

    Choose sizes that 2 ranks can share, at least two layers, and a vocabulary of at least 32: the model trains on
    numbers below 32. Everything is compared in float64.
    """

    component: ClassVar[ModelComponent]
    layouts = ("replicate2", "fsdp2", "tp2", "pp2", "cp2", "checkpointing2")
    tolerance: ClassVar[float] = 1e-9
    """Largest difference of hidden states that must be equal."""

    # --- parts ---------------------------------------------------------------------------------------------------

    def test_it_is_built_on_the_meta_device(self, tmp_path: Path) -> None:
        """The engine allocates memory and sets values later."""
        model = self._bare(tmp_path)
        placed = [name for name, tensor in model.state_dict().items() if tensor.device.type != "meta"]
        assert not placed, f"{placed[0]} has memory; make tensors with torch.empty(…) and no device, and fill none"

    def test_forward_is_the_sum_of_its_parts(self, tmp_path: Path) -> None:
        """`finish` after all `layers` after `embed`, (B, S, D); stages that split the model run the parts."""
        model = self._model(tmp_path)
        assert isinstance(model.layers, nn.ModuleDict), "`layers` must be a torch.nn.ModuleDict"
        numbers = [str(number) for number in range(len(model.layers))]
        assert list(model.layers) == numbers, f"`layers` has the keys {list(model.layers)}, which must be {numbers}"
        batch = self._batch(model)
        hidden, parts = model(batch), self._by_parts(model, batch)
        assert hidden.shape[:2] == (B, S), (
            f"forward returns {tuple(hidden.shape)}; it must be (B, S, D), from ({B}, {S})"
        )
        error = _error(hidden, parts)
        assert error <= self.tolerance, (
            f"forward differs from finish(layers(embed(batch))) by {error:.3g}; a pipeline runs the parts, each on the "
            "ranks that hold it, so nothing may happen between or around them"
        )

    def test_the_head_is_a_head(self, tmp_path: Path) -> None:
        """(B, S, D) to (B, S, V), the same within `whole`."""
        model = self._model(tmp_path)
        head = model.head
        assert isinstance(head, Head), f"`head` is a {type(head).__name__} without logits, whole and vocab_shard"
        hidden = model(self._batch(model)).detach()
        logits = head.logits(hidden)
        assert logits.shape[:2] == (B, S), f"head.logits returns {tuple(logits.shape)} for {tuple(hidden.shape)}"
        assert bool(torch.isfinite(logits).all()), "logits are not finite with the initial values"
        with head.whole(hidden.dtype):
            error = _error(head.logits(hidden), logits)
        assert error <= self.tolerance, f"within head.whole(), logits differ by {error:.3g}"

    def test_parameters_are_float32_and_activations_of_the_job(self, tmp_path: Path) -> None:
        """The dtype of the output of `embed` is the compute dtype of the whole model: there is no autocast."""
        model = self._model(tmp_path, precision="bf16")
        other = [name for name, parameter in model.named_parameters() if parameter.dtype != torch.float32]
        assert not other, f"{other[0]} is {model.state_dict()[other[0]].dtype}; parameters are stored in float32"  # type: ignore[attr-defined]
        dtype = model(self._batch(model)).dtype
        assert dtype == torch.bfloat16, (
            f'with precision = "bf16", hidden states are {dtype}; give embeddings in context.dtype, and cast '
            "parameters to the dtype of their inputs (forge_kit.nn.modules does)"
        )

    def test_weights_are_used_in_the_compute_dtype(self, tmp_path: Path) -> None:
        """Rounding the weights to bf16 first changes nothing: FSDP gathers them in that dtype, one process does not."""
        model = self._model(tmp_path, precision="bf16")
        batch, generator = self._batch(model), torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():  # ones and zeros have no digits to lose
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
            wide = model(batch)
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
            error = _error(model(batch), wide)
        assert error == 0, (
            f'with precision = "bf16", weights rounded to bf16 change hidden states by {error:.3g}; use every weight '
            "as `weight.to(x.dtype)`, widened after it where more digits are needed, or fsdp leaves one process's curve"
        )

    # --- initial values ------------------------------------------------------------------------------------------

    def test_every_tensor_is_initialised_from_the_seed_alone(self, tmp_path: Path) -> None:
        """No NaN of the uninitialised memory remains, and torch's default generator has no influence."""
        torch.manual_seed(98)  # an earlier call of this check leaves the generator as the second model has it
        first = _tensors(self._model(tmp_path))
        torch.manual_seed(99)
        second, other = _tensors(self._model(tmp_path)), _tensors(self._model(tmp_path, seed=7))
        for name, tensor in first.items():
            finite = not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
            assert finite, f"{name} is not finite after initialisation; fill it in init_parameter or init_buffers"
            assert torch.equal(tensor, second[name]), (
                f"the initial values of {name} depend on torch's default generator; draw them with `fill`"
            )
        if all(torch.equal(first[name], other[name]) for name in first):
            raise AssertionError("another seed results in the same initial values; draw them with `fill`")

    # --- declarations --------------------------------------------------------------------------------------------

    def test_what_it_declares_is_there(self, tmp_path: Path) -> None:
        """Names and patterns in its roles, ties, plans and units match its parameters and modules."""
        model = self._bare(tmp_path)
        with explained("parameter_roles is wrong"):
            roles_of(model)
        known = [name for name, _ in model.named_modules()]
        for method, names in _declared(model):
            for name in names:
                assert any(fnmatchcase(module, name) for module in known), f"{method} names {name!r}: no such module"
        if plan := model.tensor_parallel_plan():
            for name, module in model.named_modules():
                own = next(module.parameters(recurse=False), None) is not None
                assert not own or any(fnmatchcase(name, pattern) for pattern in plan), (
                    f"tensor_parallel_plan does not name {name}, which has parameters"
                )
        for other, name in model.tied_parameters().items():
            one, two = (model.get_parameter(key) for key in (other, name))
            assert one is two, f"tied_parameters has {other} and {name}, which are two parameters"

    def test_its_tap_points_are_seen_once(self, tmp_path: Path) -> None:
        """Each point is at a module that runs once in a forward pass, and has the dimensions of its axes."""
        model = self._model(tmp_path)
        if not (points := tap_points(model)):
            pytest.skip("it has no tap_points, so nothing looks inside")
        with explained("tap_points is wrong"):
            seen = seen_at_points(model.eval(), self._batch(model))
        for name, point in points.items():
            if name not in seen:
                continue
            times, dimensions = len(seen[name]), DIMENSIONS[point.axes]
            assert times == 1, (
                f"the point {name} (module {point.module!r}, {point.side}) is passed {times} times, not 1"
            )
            shape = tuple(seen[name][0].shape)
            good = len(shape) == dimensions and (point.axes == "images" or shape[:2] == (B, S))
            assert good, f"the point {name} has shape {shape}, not ({B}, {S}, …) of {dimensions} dimensions"

    def test_its_tap_points_are_used(self, tmp_path: Path) -> None:
        """When the values at a point change, hidden states do at every position from the first that depends on it."""
        model = self._model(tmp_path).eval()
        batch = self.point_batch(model, tmp_path)
        with torch.no_grad():
            expected = model(batch)
        for name, point in tap_points(model).items():
            if point.side == "pattern" or not point.differentiable or point.axes == "images":
                continue
            with explained(f"the point {name} cannot be changed"):
                used = used_at(model, batch, point, expected)
            # The first position may see only itself, so that its queries do not matter; rows may have no images.
            unused = ((used.cumsum(1) > 0) & ~used).nonzero().tolist() if bool(used.any()) else [[0, 0]]
            assert not unused, (
                f"the point {name} (module {point.module!r}, {point.side}) is not what the model uses: at row "
                f"{unused[0][0]}, position {unused[0][1]}, nothing changes with it"
            )

    def test_its_flops_are_a_number(self, tmp_path: Path) -> None:
        """FLOPs are per token, positive, and not fewer for longer sequences."""
        model = self._bare(tmp_path)
        short, long = model.flops(S), model.flops(64 * S)
        if short is None or long is None:
            pytest.skip("it states no FLOPs, so runs report no utilisation")
        good = math.isfinite(long) and 0 < short <= long
        assert good, f"flops({S}) = {short:g} and flops({64 * S}) = {long:g}; they are positive, for a token"

    # --- documents and cache -------------------------------------------------------------------------------------

    def test_documents_of_a_row_do_not_see_each_other(self, tmp_path: Path) -> None:
        """Hidden states of two documents in one row equal the hidden states of each document in a separate row."""
        model = self._model(tmp_path)
        batch, cut = self._batch(model), 3
        ids = batch["input_ids"]
        positions = torch.cat([torch.arange(cut), torch.arange(S - cut)]).expand(B, S)
        document_ids = (torch.arange(S) >= cut).long().expand(B, S)
        together = model({**batch, "positions": positions, "document_ids": document_ids})
        apart = torch.cat([model({**batch, "input_ids": part}) for part in (ids[:, :cut], ids[:, cut:])], dim=1)
        error = _error(together, apart)
        assert error <= self.tolerance, (
            f"with document_ids and positions in the batch, hidden states differ by {error:.3g} from the "
            "hidden states of each document alone; attention must stay within a document, and positions count from 0 "
            "at the start of each"
        )

    def test_a_cache_changes_nothing(self, tmp_path: Path) -> None:
        """Decoding in pieces equals forward at once, also for rows with padding on the left."""
        model = self._model(tmp_path)
        can_generate = isinstance(model, Generates)
        if not can_generate:
            pytest.skip("it has no new_cache and decode, so it cannot generate")
        model.eval()
        batch = self._batch(model)
        ids, expected = batch["input_ids"], model(batch)
        padding = torch.tensor([0, 2])
        positions = torch.arange(S) - padding[:, None]
        shifted = ids.gather(1, positions.clamp(min=0))
        cache, outputs = model.new_cache(B, S), []
        for piece in (slice(0, 4), slice(4, 5), slice(5, 8)):
            batch = {"input_ids": shifted[:, piece], "positions": positions[:, piece].clamp(min=-1)}
            with explained("decode fails"):
                outputs.append(model.decode(batch, cache))
        hidden = torch.cat(outputs, dim=1)
        for row, left in enumerate(padding.tolist()):
            error = _error(hidden[row, left:], expected[row, : S - left])
            assert error <= self.tolerance, (
                f"with a cache, hidden states of a row with {left} positions of padding differ by {error:.3g} from "
                "the result of forward; negative positions are padding, and cached positions must stay unchanged"
            )

    # --- layouts -------------------------------------------------------------------------------------------------

    def cannot_have(self, layout: str) -> str:
        needs = LAYOUTS[layout].needs
        with tempfile.TemporaryDirectory() as folder:
            lacks = needs and not getattr(self._bare(Path(folder)), needs)()
        return f"the model has no {needs}()" if lacks else super().cannot_have(layout)

    def parity_changes(self, folder: Path) -> Mapping[str, Any]:
        return {"model": self.make(folder)}

    # --- surroundings --------------------------------------------------------------------------------------------

    def _bare(self, folder: Path, **changes: Any) -> Model:
        job = self.tiny_job(folder, **{"model": self.make(folder), "precision": "fp64", **changes})
        with explained("the model cannot be built"):
            return build_bare_model(job, self.context(job))[0]

    def _model(self, folder: Path, seed: int = 42, **changes: Any) -> Any:
        model = self._bare(folder, **changes)
        try:
            materialise(model, torch.device("cpu"), seed)
            check_finite(model)
        except ForgeError as error:
            raise AssertionError(str(error)) from error
        return model

    def point_batch(self, model: Model, folder: Path) -> Batch:
        """Returns a batch in which every point is passed at every position; one with images, say."""
        return self._batch(model)

    def _batch(self, model: Model) -> Batch:
        generator = torch.Generator().manual_seed(11)
        with tempfile.TemporaryDirectory() as folder:
            fields = zero_batch(self.tiny_job(Path(folder), model=self.make(Path(folder))), B)
        del fields["labels"]
        return {**fields, "input_ids": torch.randint(32, (B, S), generator=generator)}

    def _by_parts(self, model: Model, batch: Batch) -> Tensor:
        batch = model.prepare(batch)
        carry = model.embed(batch)
        assert isinstance(carry, tuple), f"embed returns a {type(carry).__name__}; a carry is a tuple of tensors"
        for name, layer in model.layers.items():
            carry = layer(carry, batch)
            assert isinstance(carry, tuple), f"layer {name} returns a {type(carry).__name__}, not a tuple of tensors"
        return model.finish(carry, batch)


def _tensors(model: Model) -> dict[str, Tensor]:
    """Return parameters and all buffers, including those that are not saved."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _declared(model: Model) -> Iterable[tuple[str, Iterable[str]]]:
    """Yield each declaration with the names of modules, or globs, that the model returns there."""
    yield "tensor_parallel_plan", model.tensor_parallel_plan()
    yield "sequence_mixers", model.sequence_mixers()
    yield "ends", [name for end in model.ends() or () for name in end]
    yield "further_blocks", model.further_blocks()
    yield "fsdp_units", [name for unit in model.fsdp_units() for name in unit]
    yield "float8_exempt", model.float8_exempt()


def _error(outputs: Tensor, expected: Tensor) -> float:
    error = (outputs.detach().double() - expected.detach().double()).abs().max().item()
    return math.inf if math.isnan(error) else error
