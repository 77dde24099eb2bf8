"""A type of the kind `resize` in a file of the user's, as the README has it, and keys in their former places."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from forge_core.cli import main
from forge_core.contracts.errors import PluginError
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.resize import NativeResize, Resizer
from forge_plugin_images.resize.any_size import NativeResizer
from forge_plugin_images.resize.one_size import StretchResizer
from forge_plugin_vision import ImageFormat
from forge_testing.images import tiny_model
from forge_testing.refusals import lacks, naming

README = Path(__file__).parents[1] / "README.md"
FREE = ("--model.vision.encoder.position_interpolation=bilinear", "--model.vision.patches_per_sequence=40")


@pytest.fixture
def check(run_check, tmp_path):
    """(flags) -> as `run_check`, beside an image of 10 x 20 pixels with a text, and `mine.py` of the README."""
    [code] = re.findall(r'```python title="mine.py"\n(.*?)```', README.read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    pixels = np.random.default_rng(0).integers(0, 256, (10, 20, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "0.png")
    (tmp_path / "pairs.jsonl").write_text(4 * (json.dumps({"image": "0.png", "text": "abc"}) + "\n"))
    return run_check


def test_a_type_in_a_file_of_ones_own_resizes_in_training_and_prompts(check, capsys, tmp_path):
    mine = '--data.sources.0.resize={type = "./mine.py:ShorterSide", pixels = 16}'
    assert check(mine, *FREE)[0] == 0
    code, _, errors = check(mine)
    assert code != 0
    assert not lacks(errors, "data.sources.0.resize", "1000 x 700 pixels", "3 x 2 patches, and the encoder", "2 x 2")
    assert not lacks(check(mine.replace("16", "0"), *FREE)[2], "data.sources.0.resize.pixels", "> 0")
    words = ["job.toml", mine, *FREE, f"--job.output={tmp_path}/runs", "--job.name=mine"]
    assert main(words) == 0
    lines = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    # 16 x 32 pixels
    assert [line["vision/patches_per_sequence"] for line in lines if "loss" in line] == [8.0, 8.0]
    assert main(["generate", "runs/mine", "--image", "0.png", "--prompt", "x", "--max-tokens", "2"]) == 0


@pytest.mark.parametrize(
    ("flag", "facts"),
    [
        ("resize=crop", ["data.sources.0.resize", "resize table", "'crop'", '{type = "crop"}']),
        ("resize={max_patches = 9}", ["data.sources.0.resize.type", "required key is missing", "native"]),
        ("max_patches=9", ["data.sources.0.max_patches", "[data.sources.resize] max_patches"]),
        ("min_patches=9", ["data.sources.0.min_patches", "[data.sources.resize] min_patches"]),
        ("max_tiles=4", ["data.sources.0.max_tiles", "[data.sources.resize] max_tiles"]),
        ("overview=last", ["data.sources.0.overview", "[data.sources.resize] overview"]),
        ("longest_side=9", ["data.sources.0.longest_side", "[data.sources.resize] longest_side"]),
        ("max_tiled_images=1", ["data.sources.0.max_tiled_images", "[data.sources.resize] max_tiled_images"]),
        ("streaming=true", ["data.sources.0.streaming", "image_text_stream"]),
        ('resize={type = "fill", min_patches = 9}', ["data.sources.0.resize.min_patches", "unknown key", "fill"]),
    ],
)
def test_a_key_outside_its_type_is_refused_with_the_table_that_has_it(check, flag, facts):
    code, _, errors = check(f"--data.sources.0.{flag}", *FREE)
    assert code != 0
    assert not lacks(errors, *facts), errors


class TooSmall(StretchResizer):
    """Whose images are a row of patches short."""

    def images(self, image: Image.Image) -> list[Image.Image]:
        return [image.resize((32, 24))]


def test_images_that_are_not_as_measured_are_refused():
    processor = ImageProcessor(TooSmall(ImageFormat(patch=8, grid=(4, 4))))
    with pytest.raises(PluginError, match=naming("TooSmall", "9 x 7 pixels", "16 patches", "12")):
        processor.patches(Image.new("RGB", (7, 9)))


def test_equal_sizes_have_equal_keys_whatever_the_job_says():
    seen = tiny_model(any_size=True, patches_per_sequence=40, images_per_sequence=2).image_input()
    named, other = NativeResize(max_patches=20).build(seen), NativeResize(max_patches=21).build(seen)
    assert NativeResize().build(seen).key() == named.key() != other.key()
    assert NativeResize(max_patches=12).build(seen, 7.5) == NativeResizer(seen.format, 7.5)
    assert NativeResize(max_patches=6).build(seen, 7.5) == NativeResizer(seen.format, 6)
    assert Resizer(seen.format).among(3) == Resizer(seen.format)
