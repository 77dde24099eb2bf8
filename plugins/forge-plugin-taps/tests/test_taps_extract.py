"""`forge-run inside extract` and `inside taps`: a store of held-out sequences, and its forms for other libraries."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from forge_core import Trainer, load_job, load_model
from forge_core.cli import main
from forge_core.data.reading import collate
from forge_core.engine.build import build_datasets
from forge_plugin_taps import TOKENS
from forge_plugin_taps.extracting import extract
from forge_plugin_taps.lens import read_points
from forge_plugin_taps.store_reader import points_in, read_point, read_tokens, steps_of
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks

JOB = """
[train]
steps = 2
global_batch_size = 4
seq_len = 16
precision = "fp64"
[model]
type = "transformer"
vocab_size = 32
dim = 16
layers = 2
init_std = 0.3
attention = { type = "gqa", heads = 4, kv_heads = 2 }
[[data.sources]]
type = "forge_testing:Numbers"
held_out = 5
[optimizer]
type = "forge_testing:TinyAdamW"
[checkpoint]
interval = 1
keep = 2
"""
POINTS = ("layers.*.resid_post", "layers.0.z", "layers.1.pattern")
LAYOUTS = {
    "fsdp": {"fsdp": {}},
    "tp": {"tp": {"degree": 2}},
    "pp": {"pp": {"degree": 2}},
    "cp": {"cp": {"degree": 2}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extract")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("job.toml").write_text(JOB)
        assert main(["run", "job.toml"]) == 0
        flags = [word for point in POINTS for word in ("--points", point)]
        assert main(["inside", "extract", "runs/run", *flags, "--out", "acts", "--group", "3"]) == 0
    return folder


@pytest.fixture
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def whole(store, name):
    return torch.cat([read_point(step, name) for step in steps_of(Path(store))])


def columns(store, name):
    return torch.cat([read_tokens(step)[name] for step in steps_of(Path(store))])


def test_a_store_has_the_held_out_sequences_in_order(inside):
    trained = load_model("runs/run")
    held_out = build_datasets(trained.job, trained.context)[0].held_out
    batch = collate([held_out[number] for number in range(5)])
    assert [step.name for step in steps_of(Path("acts"))] == ["step-1", "step-2"]
    assert torch.equal(columns("acts", "id"), batch["input_ids"].flatten())
    assert torch.equal(columns("acts", "label"), batch["labels"].flatten())
    expected = read_points(trained.model, batch, POINTS[:2]).values
    for name, tensor in expected.items():
        assert (whole("acts", name) - tensor.flatten(0, 1)).abs().max() < 1e-12
    assert {*points_in(steps_of(Path("acts"))[0])} == {*expected, "layers.1.pattern"}


@pytest.fixture(scope="module")
def extracted(folder):
    """Stores that two ranks write, one for each layout; by rank, the numbers of sequences by layout."""

    def rank(_):
        counts = {}
        for name, stages in LAYOUTS.items():
            taps = {"points": list(POINTS), "positions": "all"}
            trained = load_model(folder / "runs/run", parallel={**stages, "taps": taps})
            counts[name] = extract(trained, folder / f"acts-{name}", sequences=0, group=3)
        return counts

    return run_on_ranks(2, rank)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_store_is_the_same_under_every_layout(inside, extracted, name):
    assert [counts[name] for counts in extracted] == [5, 5]
    for column in TOKENS:
        assert torch.equal(columns(f"acts-{name}", column), columns("acts", column))
    for point in points_in(steps_of(Path("acts"))[0]):
        assert (whole(f"acts-{name}", point) - whole("acts", point)).abs().max() < 1e-12


def test_one_process_reads_a_run_of_several_ranks(inside):
    overrides = ["job.name=two", "parallel.tp.degree=2"]
    run_on_ranks(2, lambda _: Trainer(load_job("job.toml", overrides=overrides), echo=lambda text: None).run().step)
    assert main(["inside", "extract", "runs/two", "--points", POINTS[0], "--out", "acts-of-two"]) == 0
    assert whole("acts-of-two", "layers.0.resid_post").shape == whole("acts", "layers.0.resid_post").shape


def test_an_earlier_checkpoint_some_positions_and_an_edit_of_the_command(inside, capsys):
    arguments = ["inside", "extract", "runs/run", "--points", "layers.1.resid_post", "--sequences", "2"]
    assert main([*arguments, "--step", "1", "--positions", "4", "--out", "early"]) == 0
    assert not lacks(capsys.readouterr().out.splitlines()[-1], "2 sequences", "step 1", "early")
    assert whole("early", "layers.1.resid_post").shape == (8, 16)
    edit = ["--parallel.taps.edits.off.type=zero", "--parallel.taps.edits.off.point=layers.1.resid_post"]
    assert main([*arguments, *edit, "--out", "edited", "--json"]) == 0
    loaded = {"run": "runs/run", "checkpoint": "runs/run/checkpoints/step-2", "step": 2}
    assert json.loads(capsys.readouterr().out) == {**loaded, "sequences": 2, "out": "edited"}
    assert whole("edited", "layers.1.resid_post").abs().max() == 0


def test_numpy_arrow_and_saelens_read_a_store(inside, capsys):
    import datasets

    Path(".cache").mkdir()
    Path(".cache/mine").write_text("of the user")  # beside the new folders, and named as the cache inside them
    for form in ("npz", "arrow", "saelens"):
        assert main(["inside", "taps", "export", "acts", "--to", form]) == 0
    assert Path(".cache/mine").read_text() == "of the user"
    assert not list(Path().glob("acts-*/**/.cache"))
    first = steps_of(Path("acts"))[0]
    arrays = np.load("acts-npz/step-1.npz")
    assert np.array_equal(arrays["layers.0.z"], read_point(first, "layers.0.z").numpy())
    assert np.array_equal(arrays["tokens.id"], read_tokens(first)["id"].numpy())
    table = datasets.load_from_disk("acts-arrow")
    assert table["layers.0.z"][:] == whole("acts", "layers.0.z").flatten(1).tolist()
    assert table["position"][:] == columns("acts", "position").tolist()
    # What SAELens' ActivationsStore.load_cached_activation_dataset asks of a folder
    cached = datasets.load_from_disk("acts-saelens/layers.1.resid_post")
    assert cached.column_names == ["layers.1.resid_post", "token_ids"]
    assert cached.features["layers.1.resid_post"].shape == (16, 16)
    rows = cached.with_format("torch", dtype=torch.float64)
    assert torch.equal(rows["layers.1.resid_post"][:].flatten(0, 1), whole("acts", "layers.1.resid_post"))
    assert rows["token_ids"][:].flatten().long().tolist() == columns("acts", "id").tolist()


def test_bfloat16_becomes_float32_and_the_command_says_so(tmp_path, inside, capsys):
    step = tmp_path / "half" / "step-1"
    step.mkdir(parents=True)
    (step / "taps.json").write_text('{"files": {"x.safetensors": {}, "tokens.safetensors": {}}}')
    values = torch.randn(3, 4).bfloat16()
    save_file({"x": values}, step / "x.safetensors")
    save_file({"row": torch.zeros(3).long()}, step / "tokens.safetensors")
    words = ["inside", "taps", "export", str(tmp_path / "half"), "--to", "npz", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert "bfloat16 becomes float32: x" in capsys.readouterr().out
    assert np.array_equal(np.load(tmp_path / "out" / "step-1.npz")["x"], values.float().numpy())
    assert main([*words[:-1], str(tmp_path / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "store": str(tmp_path / "half"),
        "steps": [1],
        "points": ["x"],
        "to": "npz",
        "out": str(tmp_path / "again"),
        "cast_to_float32": ["x"],
    }


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["inside", "extract", "runs/run", "--out", "acts"], ["--out acts"]),
        (["inside", "extract", "runs/run", "--out", "new", "--step", "7"], ["step 7", "1, 2"]),
        (
            ["inside", "extract", "runs/run", "--out", "new", "--points", "layers.*.resid_pots"],
            ["'layers.*.resid_post'"],
        ),
        (["inside", "extract", "runs/none", "--out", "new"], ["runs/none: no such run folder"]),
        (
            ["inside", "extract", "runs/run", "--out", "new", "--data.sources.0.held_out=0"],
            ["data.sources", "held_out_every"],
        ),
        (["inside", "taps", "show", "runs/run"], ["runs/run", "store"]),
        (["inside", "taps", "export", "early", "--to", "saelens", "--out", "x"], ["SAELens", "--positions all"]),
    ],
)
def test_what_cannot_be_done_is_refused(inside, capsys, arguments, facts):
    if arguments[2] == "early" and not Path("early").exists():
        assert main(["inside", "extract", "runs/run", "--positions", "4", "--out", "early"]) == 0
    assert main(arguments) != 0
    assert not lacks(capsys.readouterr().err, *facts)


def write_step(folder, number, rows, length, points=("x",)):
    step = folder / f"step-{number}"
    step.mkdir(parents=True)
    entries = {f"{name}.safetensors": {"shape": [rows * length, 2], "dtype": "F32"} for name in points}
    (step / "taps.json").write_text(json.dumps({"files": {**entries, "tokens.safetensors": {}}}))
    for name in points:
        save_file({name: torch.full((rows * length, 2), float(number))}, step / f"{name}.safetensors")
    tokens = {"row": torch.arange(rows).repeat_interleave(length), "position": torch.arange(length).repeat(rows)}
    save_file({**tokens, "id": torch.zeros(rows * length).long()}, step / "tokens.safetensors")


def test_sequences_of_two_lengths_are_none_of_saelens(tmp_path, capsys):
    write_step(tmp_path / "acts", 1, rows=2, length=3)
    write_step(tmp_path / "acts", 2, rows=1, length=3)
    export = ["inside", "taps", "export", str(tmp_path / "acts"), "--to", "saelens"]
    assert main([*export, "--out", str(tmp_path / "one")]) == 0
    assert "3 sequences of 3 x 2" in capsys.readouterr().out
    write_step(tmp_path / "acts", 3, rows=1, length=4)
    assert main([*export, "--out", str(tmp_path / "two")]) == 1
    assert not lacks(capsys.readouterr().err, "SAELens", "[3, 4]")


def test_a_point_that_some_steps_lack_is_exported_from_the_others(tmp_path, capsys):
    import datasets

    acts = tmp_path / "acts"
    for number, points in enumerate((("x",), ("x", "images.out"), ("images.out",)), 1):
        write_step(acts, number, rows=1, length=2, points=points)
    for form in ("npz", "arrow", "saelens"):
        assert main(["inside", "taps", "export", str(acts), "--to", form, "--out", str(tmp_path / form)]) == 0
    assert [np.load(tmp_path / f"npz/step-{n}.npz").files[:-3] for n in (1, 2, 3)] == [
        ["x"],
        ["x", "images.out"],
        ["images.out"],
    ]
    table = datasets.load_from_disk(str(tmp_path / "arrow"))
    assert table["x"][:] == [[1, 1], [1, 1], [2, 2], [2, 2], None, None]
    assert table["images.out"][:] == [None, None, [2, 2], [2, 2], [3, 3], [3, 3]]
    for name, numbers in (("x", (1, 2)), ("images.out", (2, 3))):
        cached = datasets.load_from_disk(str(tmp_path / "saelens" / name))
        assert cached[name][:] == [[[number] * 2] * 2 for number in numbers]
    capsys.readouterr()
    assert main(["inside", "taps", "show", str(acts)]) == 0
    assert not lacks(capsys.readouterr().out, "x ", "images.out", "3 steps")
    assert main(["inside", "taps", "show", str(acts), "--json"]) == 0
    entry = {"shape": [2, 2], "dtype": "F32"}
    assert json.loads(capsys.readouterr().out) == {
        "store": str(acts),
        "steps": [1, 2, 3],
        "points": [{"point": "x", **entry}, {"point": "images.out", **entry}],
    }


@pytest.mark.parametrize("form", ["arrow", "saelens"])
def test_forms_of_datasets_need_the_package(tmp_path, monkeypatch, capsys, form):
    write_step(tmp_path / "acts", 1, rows=1, length=2)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["inside", "taps", "export", str(tmp_path / "acts"), "--to", form]) == 1
    assert not lacks(capsys.readouterr().err, "pip install datasets")


def test_the_current_folder_can_be_exported(tmp_path, monkeypatch):
    write_step(tmp_path / "acts", 1, rows=1, length=2)
    monkeypatch.chdir(tmp_path / "acts")
    assert main(["inside", "taps", "export", ".", "--to", "npz"]) == 0
    assert (tmp_path / "acts-npz/step-1.npz").is_file()
