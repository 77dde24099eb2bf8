"""Patches equal the image processors' of transformers, to the bit."""

from __future__ import annotations

import io
from functools import partial

import numpy as np
import pytest
from attrs import evolve, frozen
from PIL import Image

from forge_core.contracts.layout import Layout
from forge_plugin_images import ImageText
from forge_plugin_images.decoding import BytesImage, ImageDecoder
from forge_plugin_images.image_file import BrokenImage
from forge_plugin_images.patches import frames_of, patches_of
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.resize.any_size import FillResizer, NativeResizer, native_size
from forge_plugin_images.resize.one_size import CropResizer, PadResizer, StretchResizer
from forge_plugin_images.resize.tiles import TilesResizer
from forge_plugin_vision import ImageFormat, ViT
from forge_testing.images import tiny_model
from forge_testing.refusals import at, check_problems, naming

SIZES = [(37, 61), (100, 33), (64, 64), (15, 200)]
"""Heights and widths of images."""


def photo(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """A smooth image with an edge and some noise."""
    y, x = np.mgrid[:height, :width]
    waves = [128 + 100 * np.sin(x / (3 + band) + y / (7 - band)) for band in range(3)]
    noise = np.random.default_rng(0).normal(0, 6, (height, width, 3))
    pixels = np.stack(waves, -1) + noise
    pixels[height // 3 :, width // 2 :] *= 0.5
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options) -> BytesImage:
    data = io.BytesIO()
    image.save(data, format, **options)
    return BytesImage("an image", data.getvalue())


def whole(patches: np.ndarray, rows: int, columns: int, side: int) -> np.ndarray:
    """Patches (n, V) -> pixels (3, height, width)."""
    return patches.reshape(rows, columns, 3, side, side).transpose(2, 0, 3, 1, 4).reshape(3, rows * side, -1)


def unscaled(pixels, processor) -> np.ndarray:
    """Undo rescaling and normalisation: (3, height, width) -> levels of 255."""
    mean, std = np.array(processor.image_mean)[:, None, None], np.array(processor.image_std)[:, None, None]
    return np.asarray(pixels, np.float64) * std * 255 + mean * 255


@pytest.mark.parametrize("size", SIZES)
def test_stretched_images_are_those_of_siglip(size):
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    reference = SiglipImageProcessorPil(size={"height": 32, "width": 48}, resample=3)
    ours = ImageProcessor(StretchResizer(ImageFormat(patch=16, grid=(2, 3))))
    expected = unscaled(reference(photo(*size))["pixel_values"][0], reference)
    assert np.abs(whole(ours.patches(photo(*size)), 2, 3, 16) - expected).max() < 1e-4
    assert ours.grids(size) == ((1, 2, 3),)


@pytest.mark.parametrize("size", SIZES)
def test_cropped_images_are_those_of_clip(size):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    reference = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    ours = ImageProcessor(CropResizer(ImageFormat(patch=8, grid=(4, 4))))
    expected = unscaled(reference(photo(*size))["pixel_values"][0], reference)
    assert np.abs(whole(ours.patches(photo(*size)), 4, 4, 8) - expected).max() < 1e-4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("least", "most"), [(4, 400), (4, 60), (60, 100)])
def test_native_images_are_those_of_qwen(size, least, most):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pixels = {"shortest_edge": least * 16, "longest_edge": most * 16}
    reference = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=pixels)
    ours = ImageProcessor(NativeResizer(ImageFormat(patch=4, frames=2, multiple=2), most, least))
    expected = reference(photo(*size))
    grid = ours.grids(size)[0]
    assert list(grid) == expected["image_grid_thw"][0].tolist()
    # Theirs has the patches of each 2 x 2 together, ours row by row.
    _, rows, columns = grid
    merged = np.asarray(expected["pixel_values"]).reshape(rows // 2, columns // 2, 2, 2, -1)
    by_rows = merged.transpose(0, 2, 1, 3, 4).reshape(rows * columns, 3, -1)
    mean, std = np.array(reference.image_mean)[:, None], np.array(reference.image_std)[:, None]
    assert np.abs(ours.patches(photo(*size)).reshape(by_rows.shape) - (by_rows * std + mean) * 255).max() < 1e-4


@pytest.mark.parametrize("size", SIZES)
def test_filling_images_are_those_of_siglip_2(size):
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    reference = Siglip2ImageProcessorPil(patch_size=8, max_num_patches=30)
    ours = ImageProcessor(FillResizer(ImageFormat(patch=8, resample="bilinear"), 30))
    expected = reference(photo(*size))
    grid = ours.grids(size)[0]
    assert [grid.rows, grid.columns] == np.asarray(expected["spatial_shapes"])[0].tolist()
    # A patch of theirs is in the order row, column, channel.
    theirs = np.asarray(expected["pixel_values"])[0][: grid.patches].reshape(-1, 8, 8, 3).transpose(0, 3, 1, 2)
    mean, std = np.array(reference.image_mean)[:, None, None], np.array(reference.image_std)[:, None, None]
    assert np.abs(ours.patches(photo(*size)).reshape(theirs.shape) - (theirs * std + mean) * 255).max() < 1e-4


@pytest.mark.parametrize(
    ("grid", "padded", "place"),
    [((4, 4), (60, 60), (0, 15)), ((8, 4), (60, 120), (0, 45)), ((2, 8), (120, 30), (30, 0))],
)
def test_padded_images_are_those_of_llava(grid, padded, place):
    """`expand2square` with the mean colour, as in LLaVA-1.5, then one size; the canvas has the shape of the grid."""
    image, form = photo(30, 60), ImageFormat(patch=8, grid=grid, mean=(0.48, 0.46, 0.41))
    canvas = Image.new("RGB", padded, tuple(int(255 * mean) for mean in form.mean))
    canvas.paste(image, place)
    resized = canvas.resize((8 * grid[1], 8 * grid[0]), Image.Resampling.BICUBIC)
    patches = ImageProcessor(PadResizer(form)).patches(image)
    assert (whole(patches, *grid, 8) == np.asarray(resized).transpose(2, 0, 1)).all()


@pytest.mark.parametrize("size", [(1, 5000), (5000, 1), (3, 3), (999, 1001)])
def test_a_native_image_never_has_more_patches_than_allowed(size):
    height, width = native_size(size, 8, 0, 64 * 20)
    assert height * width <= 64 * 20
    assert height % 8 == width % 8 == 0 < min(height, width)


@pytest.mark.parametrize("kept", [0, 4, 60])
def test_a_damaged_image_is_named(kept):
    file = encoded(photo(40, 40), "JPEG")
    with pytest.raises(BrokenImage, match=naming("image 'half'")):
        ImageDecoder().decode(BytesImage("half", file.data[: len(file.data) * kept // 100]))


@pytest.mark.parametrize(
    ("grid", "resizer"),
    [
        ((4, 4), StretchResizer),
        ((4, 4), CropResizer),
        ((4, 4), PadResizer),
        ((4, 4), partial(TilesResizer, max_tiles=4)),
        (None, partial(NativeResizer, max_patches=16)),
    ],
)
def test_an_encoder_of_one_channel_sees_greys(grid, resizer):
    one, three = ImageFormat(patch=8, grid=grid, channels=1), ImageFormat(patch=8, grid=grid)
    assert one.mean == one.std == (0.5,)
    grey = ImageProcessor(resizer(one)).patches(photo(50, 90))
    colours = ImageProcessor(resizer(three)).patches(photo(50, 90, "L").convert("RGB"))
    assert (grey == colours.reshape(len(grey), 3, 64)[:, 1]).all()
    assert (ImageProcessor(resizer(one)).read(encoded(photo(50, 90))) == grey).all()


def test_a_format_has_a_mean_for_each_channel():
    with pytest.raises(ValueError, match=naming("'mean'", 3, 1)):
        ImageFormat(patch=8, channels=1, mean=(0.1, 0.2, 0.3))


@frozen(kw_only=True)
class WithDepth(ViT):
    """Takes colours and depth."""

    def image_format(self) -> ImageFormat:
        return evolve(super().image_format(), channels=4, mean=(0.5,) * 4, std=(0.5,) * 4)


def test_channels_that_no_image_has_are_refused_when_the_job_is_checked(make_job, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    model = tiny_model()
    encoder = WithDepth(dim=16, layers=1, heads=2, patch=8, size=(8, 8))
    job = make_job(ImageText(path=str(tmp_path)), model=evolve(model, vision=evolve(model.vision, encoder=encoder)))
    check_problems(job.data.sources[0].problems(job, Layout()), at("", 4, 3, 1))


def test_patches_become_the_frames_again():
    """Two entries of the time axis with two frames each."""
    frames = np.random.default_rng(0).integers(0, 256, (4, 8, 12, 3)).astype(np.uint8)
    form, apart = ImageFormat(patch=4, frames=2), ImageFormat(patch=4)
    alone = np.stack([patches_of(frame, apart) for frame in frames]).reshape(2, 2, 6, 3, 16)
    patches = np.concatenate([alone.transpose(0, 2, 3, 1, 4).reshape(12, -1), np.zeros((3, form.values))])
    assert (frames_of(patches, np.array([2, 2, 3]), form) == frames).all()
    image = patches_of(frames[0], form)
    assert (frames_of(image, np.array([1, 2, 3]), form) == frames[[0, 0]]).all()
