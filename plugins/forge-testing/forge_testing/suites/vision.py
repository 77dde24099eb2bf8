"""Contract of every fusion, as tests. Shapes: B sequences, S positions, P patches of a row, V values of a patch.

class TestJoint(VisionModelSuite):
    component = VisionLanguage(
        language=Transformer(vocab_size=32, dim=16, layers=2),
        vision=VisionPart(encoder=ViT(dim=16, layers=1, heads=2, patch=2, size=(4, 6)), images_per_sequence=2),
        fusion=Joint(),
    )
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.nn import functional as F

from forge_core.contracts.data import Batch
from forge_core.contracts.model import Model
from forge_core.data.reading import collate
from forge_kit.nn.generation import Generates
from forge_plugin_vision.kinds import GRIDS, PATCHES, SECONDS, VIDEO, Grid
from forge_plugin_vision.modules.images import plain_grids
from forge_plugin_vision.vision import VisionLanguage
from forge_testing.suites import ModelSuite
from forge_testing.vision import RandomImages

B, S = 4, 24


class VisionModelSuite(ModelSuite):
    """All of `ModelSuite` on text, and more on rows with images: what they change, and what they must not change.

    Rows 0 and 2 of a batch have no image. Choose images of which one or two fit into 22 positions, and values of
    zero-initialised parameters (gates) that are not zero, or images change nothing and every test passes.
    """

    component: ClassVar[VisionLanguage]
    images: ClassVar[RandomImages] = RandomImages(text_only=2, held_out=5)
    """Rows of the tests; under layouts, every second one has no image."""
    rounding: ClassVar[float] = 0.0
    """Largest difference of hidden states that images must not change. Above 0 for models that gather positions for
    their products, as experts do: how many there are of other rows then changes the last digit."""

    def parity_changes(self, folder: Path) -> Mapping[str, Any]:
        """Returns the settings of `ModelSuite`, with rows of `images`, in sequences of S positions."""
        # Text rows lack the entries of images, like the rows of a source of text.
        images = evolve(self.images, has_entries=False)
        return {**super().parity_changes(folder), "data": {"sources": (images,)}, "seq_len": S}

    def test_its_flops_are_a_number(self, tmp_path: Path) -> None:
        """FLOPs are per token and positive; a longer row, whose images cost the same, has no fewer in all."""
        model = self._bare(tmp_path)
        short, long = model.flops(S), model.flops(64 * S)
        if short is None or long is None:
            pytest.skip("it states no FLOPs, so runs report no utilisation")
        assert 0 < short <= 64 * long < math.inf, f"flops({S}) = {short:g} and flops({64 * S}) = {long:g}, for a token"

    # --- text ----------------------------------------------------------------------------------------------------

    def test_text_is_the_language_models_own(self, tmp_path: Path) -> None:
        """Parameters have the names and initial values of the language model, and rows of text its hidden states."""
        model, language = self._model(tmp_path), self._model(tmp_path, model=self.component.language)
        own = dict(model.named_parameters())
        for name, parameter in language.named_parameters():
            assert name in own, f"the language model's {name} is gone; fusions add parameters and rename none"
            assert torch.equal(own[name], parameter), f"{name} has another initial value than in the language model"
        ids = self._batch(model)["input_ids"]
        expected, batch = language({"input_ids": ids}), self._image_batch(tmp_path)
        empty = {
            PATCHES: torch.zeros_like(batch[PATCHES][: len(ids)]),
            GRIDS: torch.zeros_like(batch[GRIDS][: len(ids)]),
            SECONDS: torch.zeros_like(batch[SECONDS][: len(ids)]),
        }
        for extra in ({}, empty):
            entries = "entries of images without one" if extra else "no entries of images"
            same = torch.equal(model({"input_ids": ids, **extra}), expected)
            assert same, f"with {entries}, hidden states of text are not the language model's to the bit"

    def test_without_an_image_the_tower_has_no_gradient(self, tmp_path: Path) -> None:
        """A whole batch without an image: every gradient is finite, the tower's gradients are zero or absent."""
        model = self._model(tmp_path)
        batch = self._image_batch(tmp_path)
        text = {name: tensor[0:3:2] for name, tensor in batch.items()}
        model(text).square().sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert bool(torch.isfinite(parameter.grad).all()), f"the gradient of {name} is not finite"
                if name.startswith("vision."):
                    assert not bool(parameter.grad.any()), f"{name} has a gradient, without an image in the batch"

    # --- learning ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("stage", ["vision.adapter", "vision.encoder", "vision", "", "all"])
    def test_gradients_reach_what_trains_and_nothing_else(self, tmp_path: Path, stage: str) -> None:
        """Of parts frozen, no parameter has a gradient, and others have the one that they have if all trains.

        What trains: the adapter, the encoder, both, all else, everything.
        """
        model, rows = self._model(tmp_path), self._labelled_rows(tmp_path)
        self._losses(model, rows).sum().backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        if stage == "all":
            for part in ("vision.encoder.", "vision.adapter.", "layers.", "embedding."):
                own = [gradient for name, gradient in expected.items() if name.startswith(part)]
                assert any(bool(gradient.any()) for gradient in own if gradient is not None), f"{part}* learns nothing"
            return
        for name, parameter in model.named_parameters():
            parameter.grad = None
            parameter.requires_grad_(name.startswith(f"{stage}.") if stage else not name.startswith("vision."))
        self._losses(model, rows).sum().backward()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, f"{name} is frozen, and has a gradient"
                continue
            none = torch.zeros_like(parameter)
            whole, alone = (none if each is None else each for each in (expected[name], parameter.grad))
            error = (whole - alone).abs().max().item()
            assert error <= self.tolerance, f"the gradient of {name} is off by {error:.3g} if other parts are frozen"

    def test_images_that_change_rows_take_their_losses_along(self, tmp_path: Path) -> None:
        """Four rows of one text: each image has its own loss, wherever it is in the batch."""
        model, rows = self._model(tmp_path), self._labelled_rows(tmp_path)
        one = {name: tensor[1:2].expand(B, *tensor.shape[1:]) for name, tensor in rows.items()}
        # Row 1, as row 0 has no image.
        used = int(plain_grids(rows[GRIDS][1]).prod(-1).sum())
        generator = torch.Generator().manual_seed(3)
        patches = one[PATCHES].clone()
        patches[:, :used] = torch.randint(256, patches[:, :used].shape, generator=generator, dtype=torch.uint8)
        losses = self._losses(model, {**one, PATCHES: patches})
        gaps = (losses.unsqueeze(0) - losses.unsqueeze(1)).abs() + torch.eye(B)  # a loss is equal to itself
        assert gaps.min() > self.tolerance, "two images have the same loss: the loss does not depend on images"
        order = torch.tensor([2, 0, 3, 1])
        permuted = self._losses(model, {**one, PATCHES: patches[order]})
        error = (permuted - losses[order]).abs().max().item()
        assert error <= self.tolerance, f"images in another order have other losses, by {error:.3g}"

    def test_the_first_token_after_an_image_is_learned_from_it(self, tmp_path: Path) -> None:
        """The last position of an image has the next token as its label, and predicts it from the image."""
        model, rows = self._model(tmp_path), self._labelled_rows(tmp_path)
        image = rows["input_ids"] < 0
        last = torch.zeros_like(image)
        last[:, :-1] = image[:, :-1] & ~image[:, 1:]
        assert last.any(), "no image is followed by a token"
        following = rows["input_ids"].roll(-1, 1)
        assert torch.equal(rows["labels"][last], following[last]), "the label there is not the token that follows"
        assert not (rows["labels"][:, :-1][image[:, 1:]] >= 0).any(), "a position before an image's has a label"
        other = {**rows, PATCHES: 255 - rows[PATCHES]}
        hidden, changed = (model(_unlabelled(each))[last] for each in (rows, other))
        assert bool((hidden != changed).any(-1).all()), "other images change nothing at an image's last position"

    # --- images --------------------------------------------------------------------------------------------------

    def test_an_image_changes_its_own_row_alone(self, tmp_path: Path) -> None:
        """Other patches change hidden states of their row, and no other; not those before the image's place."""
        model, batch = self._model(tmp_path), self._image_batch(tmp_path)
        hidden = model(batch)
        for row in (1, 3):
            other = {**batch, PATCHES: batch[PATCHES].clone()}
            other[PATCHES][row] = 255 - other[PATCHES][row]
            changed = (model(other) - hidden).abs().amax(-1) > self.rounding
            assert bool(changed[row].any()), f"other patches in row {row} change nothing there: nothing sees images"
            rest = [number for number in range(B) if number != row]
            assert not bool(changed[rest].any()), f"other patches in row {row} change hidden states of another row"
            first = int((batch["input_ids"][row] < 0).nonzero()[0])
            assert not bool(changed[row, :first].any()), "hidden states before the first image depend on it"

    def test_every_patch_of_an_image_matters(self, tmp_path: Path) -> None:
        """And its place: two patches that change places change hidden states."""
        model, batch = self._model(tmp_path), self._image_batch(tmp_path)
        hidden, patches = model(batch), int(plain_grids(batch[GRIDS][1]).prod(-1).sum())
        for number in range(patches):
            other = {**batch, PATCHES: batch[PATCHES].clone()}
            other[PATCHES][1, number] = 255 - other[PATCHES][1, number]
            assert not torch.equal(model(other)[1], hidden[1]), f"patch {number} of {patches} changes nothing"
        swapped = {**batch, PATCHES: batch[PATCHES].clone()}
        swapped[PATCHES][1, :2] = batch[PATCHES][1, :2].flip(0)
        assert not torch.equal(model(swapped)[1], hidden[1]), "two patches that change places change nothing"

    def test_what_fills_a_row_of_patches_does_not_matter(self, tmp_path: Path) -> None:
        """Patches behind the last image of a row are arbitrary."""
        model, batch = self._model(tmp_path), self._image_batch(tmp_path)
        other = {**batch, PATCHES: batch[PATCHES].clone()}
        for row, used in enumerate(plain_grids(batch[GRIDS]).prod(-1).sum(1).tolist()):
            other[PATCHES][row, used:] = 99
        error = (model(other) - model(batch)).abs().max().item()
        assert error <= self.rounding, f"patches that belong to no image change hidden states by {error:.3g}"

    def test_images_of_a_document_are_not_seen_by_another(self, tmp_path: Path) -> None:
        """Two documents with an image each in one row: other patches of one image leave the other document alone."""
        model, batch = self._model(tmp_path), self._two_documents(tmp_path)
        hidden, sizes = model(batch), plain_grids(batch[GRIDS][0]).prod(-1)
        second = batch["document_ids"][0].bool()
        for image, own in ((0, ~second), (1, second)):
            start = int(sizes[:image].sum())
            other = {**batch, PATCHES: batch[PATCHES].clone()}
            other[PATCHES][0, start : start + int(sizes[image])] ^= 255  # inverts every byte
            changed = (model(other) - hidden).abs().amax(-1)[0] > self.rounding
            assert bool(changed[own].any()), f"image {image} changes nothing in its own document"
            assert not bool(changed[~own].any()), f"image {image} changes hidden states of the other document"

    def test_a_video_is_seen_frame_by_frame(self, tmp_path: Path) -> None:
        """A clip of two frames: each changes hidden states behind it, none before it or of other documents."""
        model, batch = self._model(tmp_path), self._clip_batch(tmp_path)
        hidden, ids, size = model(batch), batch["input_ids"][0], int(batch[GRIDS][0, 0, 1:].prod())
        first, second = int((ids == VIDEO).nonzero()[0]), batch["document_ids"][0].bool()
        for frame in range(2):
            other = {**batch, PATCHES: batch[PATCHES].clone()}
            other[PATCHES][0, frame * size : (frame + 1) * size] ^= 255
            changed = (model(other) - hidden).abs().amax(-1)[0] > self.rounding
            assert bool(changed[first:][~second[first:]].any()), f"frame {frame} of a clip changes nothing"
            assert not bool(changed[:first].any()), f"hidden states before the clip depend on its frame {frame}"
            assert not bool(changed[second].any()), f"frame {frame} of a clip changes the document behind it"
        form, (_, rows, columns) = self.component.image_input(), (int(side) for side in batch[GRIDS][0, 0])
        if form.positions(Grid(1, rows, columns)) == form.positions(Grid(2, rows, columns)):
            return  # all frames share their positions, so that their order is not seen: datasets refuse clips
        swapped = {**batch, PATCHES: batch[PATCHES].clone()}
        swapped[PATCHES][0, : 2 * size] = batch[PATCHES][0, : 2 * size].unflatten(0, (2, size)).flip(0).flatten(0, 1)
        assert not torch.equal(model(swapped), hidden), "two frames that change places change nothing"

    def test_a_cache_changes_nothing_with_images(self, tmp_path: Path) -> None:
        """Decoding a prompt with images, rows of unequal length included, and then token by token equals forward."""
        model = self._model(tmp_path).eval()
        can_generate = isinstance(model, Generates)
        if not can_generate:
            pytest.skip("it has no new_cache and decode, so it cannot generate")
        batch = self._image_batch(tmp_path)
        expected, ids, left = model(batch), batch["input_ids"], torch.tensor([0, 3, 2, 0])
        positions = torch.arange(S) - left[:, None]
        # A row that is moved to the right loses its last tokens, of which none is an image's.
        shifted = ids.gather(1, positions.clamp(min=0)).where(positions >= 0, 0)
        prompt = S - 4
        cache, outputs = model.new_cache(B, S), []
        for start, stop in ((0, prompt), *((at, at + 1) for at in range(prompt, S))):
            piece: Batch = {"input_ids": shifted[:, start:stop], "positions": positions[:, start:stop].clamp(min=-1)}
            images = {name: batch[name] for name in (PATCHES, GRIDS, SECONDS)} if start == 0 else {}
            outputs.append(model.decode({**piece, **images}, cache))
        hidden = torch.cat(outputs, dim=1)
        for row, skipped in enumerate(left.tolist()):
            error = (hidden[row, skipped:] - expected[row, : S - skipped]).abs().max().item()
            assert error <= self.tolerance, (
                f"with a cache, hidden states of row {row} differ by {error:.3g} from forward's"
            )

    # --- surroundings --------------------------------------------------------------------------------------------

    def point_batch(self, model: Model, folder: Path) -> Batch:
        """Returns a batch with images, without which no point of the tower is passed."""
        return self._image_batch(folder)

    def _image_batch(self, folder: Path) -> Batch:
        dataset = self._rows(folder)
        return self._collated([dataset[number] for number in range(B)])

    def _two_documents(self, folder: Path) -> Batch:
        """One row: two documents of equal length, each with an image after its first token."""
        dataset, half = self._rows(folder), S // 2
        sample = dataset[1]
        form, count = self.component.image_input(), self.component.image_input().images_per_sequence
        assert count >= 2, "choose images_per_sequence = 2 at least"
        grid = next(each for each in sample[GRIDS] if each.any())
        size = Grid(*map(int, grid)).patches
        positions = form.positions(Grid(*map(int, grid)))
        assert positions <= half - 3, f"an image takes {positions} positions; choose one that fits into {half - 3}"
        generator = np.random.default_rng(7)
        ids = generator.integers(0, 32, S)
        for start in (1, half + 1):
            ids[start : start + positions] = -1
        patches, grids = np.zeros_like(sample[PATCHES]), np.zeros_like(sample[GRIDS])
        patches[: 2 * size] = generator.integers(0, 256, (2 * size, patches.shape[1]))
        grids[:2] = grid
        row = {
            "input_ids": ids,
            "document_ids": (np.arange(S) >= half).astype(np.int64),
            "positions": np.arange(S) % half,
            PATCHES: patches,
            GRIDS: grids,
            SECONDS: np.zeros_like(sample[SECONDS]),
        }
        return self._collated([row])

    def _clip_batch(self, folder: Path) -> Batch:
        """One row: a document with a clip of two frames after its first token, and one of text alone."""
        dataset = self._rows(folder)
        sample, form = dataset[1], self.component.image_input()
        if form.format.arrangements:
            pytest.skip("its encoder takes images in tiles, and no videos")
        _, rows, columns = (int(side) for side in next(each for each in sample[GRIDS] if each.any()))
        grid = Grid(2, rows, columns)
        positions, generator = form.positions(grid), np.random.default_rng(5)
        if positions > S - 8 or grid.patches > form.patches_per_sequence:
            pytest.skip(f"a clip of two frames takes {positions} positions and {grid.patches} patches: too many here")
        ids = generator.integers(0, 32, S)
        ids[1 : 1 + positions] = VIDEO
        patches, grids = np.zeros_like(sample[PATCHES]), np.zeros_like(sample[GRIDS])
        patches[: grid.patches] = generator.integers(0, 256, (grid.patches, patches.shape[1]))
        grids[0], seconds = grid, np.zeros_like(sample[SECONDS])
        seconds[0] = 0.5
        second = np.arange(S) >= S - 4
        row = {
            "input_ids": ids,
            "document_ids": second.astype(np.int64),
            "positions": np.where(second, np.arange(S) - (S - 4), np.arange(S)),
            PATCHES: patches,
            GRIDS: grids,
            SECONDS: seconds,
        }
        return self._collated([row])

    def _labelled_rows(self, folder: Path) -> dict[str, Tensor]:
        dataset = self._rows(folder)
        return collate([dataset[number] for number in range(B)])

    def _losses(self, model: Any, rows: Mapping[str, Tensor]) -> Tensor:
        """Returns the mean loss of each row (B,)."""
        logits = model.head.logits(model(_unlabelled(rows)))
        labels = rows["labels"]
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        return each.sum(1) / (labels >= 0).sum(1)

    def _rows(self, folder: Path) -> Any:
        job = self.tiny_job(folder, model=self.component, precision="fp64", seq_len=S)
        return self.images.build(self.context(job))

    def _collated(self, rows: list[Any]) -> dict[str, Tensor]:
        return _unlabelled(collate(rows))


def _unlabelled(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in rows.items() if name != "labels"}
