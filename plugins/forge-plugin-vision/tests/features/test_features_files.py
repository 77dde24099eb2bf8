"""What features are found by, and files that are damaged or written by several at once."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from unittest.mock import Mock

import pytest
import torch
from kept_runs import job, model, run

from forge_core.contracts.errors import ForgeError
from forge_core.engine.build import build_context, build_run
from forge_core.plugins.catalog import Catalog
from forge_plugin_vision import Joint, VisionLanguage, VisionPart, ViT
from forge_plugin_vision.features import Features
from forge_plugin_vision.features.files import FeatureFiles
from forge_plugin_vision.features.identity import image_keys
from forge_testing.refusals import naming

SHAPE, KEY = (2, 4, 8), "ab" * 32


def folders(tmp_path):
    return {path.parent.name for path in (tmp_path / "features").glob("*/tower.json")}


@pytest.fixture
def files(tmp_path):
    return FeatureFiles(tmp_path, {"type": "test"}, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_features_come_back_to_the_bit(files, dtype):
    features = torch.randn(SHAPE).to(dtype)
    assert files.read(KEY, SHAPE, dtype) is None
    assert files.write(KEY, features.transpose(0, 1).contiguous().transpose(0, 1))
    assert files.read(KEY, SHAPE, dtype).equal(features)
    assert not files.damaged


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-5])


def empty(path):
    path.write_bytes(b"")


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def of_another_image(path):
    other = FeatureFiles(path.parents[2], {"type": "test"}, 0)
    other.write("cd" * 32, torch.ones(SHAPE))
    path.write_bytes(other.path("cd" * 32).read_bytes())


def of_another_size(path):
    FeatureFiles(path.parents[2], {"type": "test"}, 0).write(KEY, torch.ones(2, 3, 8))


def of_another_program(path):
    from safetensors.torch import save_file

    save_file({"weights": torch.ones(SHAPE)}, path)


def a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage", [cut_short, empty, flip_a_bit, of_another_image, of_another_size, of_another_program, a_folder]
)
def test_a_damaged_file_is_named_and_never_used(files, caplog, damage):
    files.write(KEY, torch.randn(SHAPE))
    damage(files.path(KEY))
    assert files.read(KEY, SHAPE, torch.float32) is None
    assert files.damaged == 1
    assert f"features in {files.path(KEY)} are damaged" in caplog.text


def test_a_folder_that_is_gone_is_named(files):
    shutil.rmtree(files.folder)
    with pytest.raises(ForgeError, match=naming(files.path(KEY))):
        files.write(KEY, torch.randn(SHAPE))


def test_a_run_computes_damaged_features_again(tmp_path):
    kept = Features(path=str(tmp_path / "features"))
    plain, first = run(tmp_path, "plain", steps=4), run(tmp_path, "first", features=kept, steps=4)
    written = sorted((tmp_path / "features").rglob("*.safetensors"))
    before = [path.read_bytes() for path in written]
    for path in written[::2]:
        flip_a_bit(path)
    again = run(tmp_path, "again", features=kept, steps=4)
    assert plain.equals(first)
    assert plain.equals(again)
    assert sum(line["features/damaged"] for line in again.lines) == len(written[::2])
    assert [path.read_bytes() for path in written] == before


def test_a_file_is_whole_whenever_it_is_read(files):
    """While two threads write it again and again."""
    values = [torch.full((2, 4, 4096), float(number)) for number in range(2)]
    stop = threading.Event()

    def write(value):
        while not stop.is_set():
            files.write(KEY, value)

    writers = [threading.Thread(target=write, args=(value,)) for value in values]
    files.write(KEY, values[0])
    for writer in writers:
        writer.start()
    try:
        seen = [files.read(KEY, (2, 4, 4096), torch.float32) for _ in range(100)]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert files.damaged == 0
    assert all(any(each.equal(value) for value in values) for each in seen)
    assert [path.name for path in files.path(KEY).parent.iterdir()] == [files.path(KEY).name]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ForgeError, match=naming(f"{tmp_path}/file", "plugins.features.path")):
        FeatureFiles(tmp_path / "file", {"type": "test"}, 0)


def test_features_that_cannot_be_written_end_the_run_and_leave_nothing_half_written(files, tmp_path, monkeypatch):
    folder = files.path(KEY).parent
    refused = pytest.raises(ForgeError, match=naming(files.path(KEY), "plugins.features.path"))
    folder.write_text("")
    with refused:
        files.write(KEY, torch.zeros(SHAPE))
    folder.unlink()
    monkeypatch.setattr("os.replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with refused:
        files.write(KEY, torch.zeros(SHAPE))
    assert list(folder.iterdir()) == []


def test_an_image_is_found_by_its_bytes_and_its_grid():
    patches = torch.arange(2 * 6 * 3, dtype=torch.uint8).view(2, 6, 3)
    patches[1, 4:] = patches[0, :2]
    grids = torch.tensor([[[1, 1, 2], [1, 2, 2]], [[1, 2, 2], [1, 1, 2]]])
    first, second, third, fourth = image_keys(patches, grids)
    assert [(each.row, each.start, each.stop) for each in (first, second, third, fourth)] == [
        (0, 0, 2),
        (0, 2, 6),
        (1, 0, 4),
        (1, 4, 6),
    ]
    assert first.key == fourth.key
    assert len({first.key, second.key, third.key}) == 3
    turned, *_ = image_keys(patches, grids[..., [0, 2, 1]])
    assert turned.key != first.key
    changed = patches.clone()
    changed[0, 1, 2] ^= 1
    assert image_keys(changed, grids)[0].key != first.key
    assert not image_keys(patches, torch.zeros_like(grids))


def part(**keys):
    return VisionPart(encoder=ViT(**keys), images_per_sequence=2)


def towers():
    small = {"dim": 16, "layers": 1, "heads": 2, "patch": 2, "size": (4, 4)}
    own = model().language
    yield "mean", {"model": VisionLanguage(language=own, vision=part(**small, mean=(0.4, 0.5, 0.5)))}
    yield "activation", {"model": VisionLanguage(language=own, vision=part(**small, activation="gelu"))}
    yield (
        "taps",
        {"model": VisionLanguage(language=model().language, vision=part(**small), fusion=Joint(deepstack=(0,)))},
    )
    yield "dtype", {"precision": "bf16"}
    yield "weights", {"job": {"seed": 7}}


TOWERS = dict(towers())


@pytest.mark.parametrize("what", TOWERS)
def test_another_tower_has_another_folder(tmp_path, what):
    kept, small = Features(path=str(tmp_path / "features")), part(dim=16, layers=1, heads=2, patch=2, size=(4, 4))
    own = {"model": VisionLanguage(language=model().language, vision=small), "steps": 1}
    run(tmp_path, "one", features=kept, **own)
    run(tmp_path, "same", features=kept, **own)
    assert len(folders(tmp_path)) == 1
    other = run(tmp_path, "other", features=kept, **own | TOWERS[what])
    assert other.hits == [0]
    assert len(folders(tmp_path)) == 2


def test_a_folder_says_whose_features_it_has(tmp_path):
    run(tmp_path, features=Features(path=str(tmp_path / "features")), steps=1)
    (described,) = (tmp_path / "features").glob("*/tower.json")
    tower = json.loads(described.read_text())
    assert tower["type"] == "forge-plugin-vision/vit"
    assert "layers=1" in tower["keys"]
    assert tower["dtype"] == "torch.float32"


def test_features_are_in_forges_cache_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    run(tmp_path, features=Features(), steps=1)
    assert list((tmp_path / "cache" / "features").rglob("*.safetensors"))


def test_nothing_is_opened_before_a_run_trains(tmp_path):
    """So `check`, `plan`, the dry run and generation neither read nor write."""
    built = job(tmp_path, features=Features(path=str(tmp_path / "features")))
    build_run(built, build_context(built, Catalog.installed(), tmp_path))
    assert not (tmp_path / "features").exists()
