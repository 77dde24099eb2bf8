"""`forge-run inside sae`, on what a run has stored."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from sae_stranger import job, run, sae

from forge_core.cli import main
from forge_plugin_sae import BatchTopK
from forge_plugin_sae.model import load
from forge_plugin_taps import Store, manifest_of, steps_of
from forge_testing.refusals import lacks

SETTINGS = """
[sae]
latents = 24
lr = 0.01
warmup = 4
batch = 32
buffer = 64
dead_after = 96
precision = "fp64"
points = ["*.resid_post"]
[sae.activation]
type = "batch_topk"
k = 3
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    (folder / "sae.toml").write_text(SETTINGS)
    return run(job(folder, sinks={"store": Store(), "sae": sae(activation=BatchTopK(k=3))}))


def test_it_trains_what_the_sink_trains(stored, capsys):
    words = ["inside", "sae", str(stored), str(stored.parent / "sae.toml"), "--held-out", "0"]
    assert main([*words, "--out", str(stored / "x")]) == 0
    for number in range(2):
        mine, theirs = (load(stored / name / f"layers.{number}.resid_post").state_dict() for name in ("x", "sae"))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert f"written to {stored / 'x'}" in capsys.readouterr().out


def test_more_epochs_explain_more_of_what_was_held_out(stored, capsys):
    found = []
    for epochs in ("1", "6"):
        files = [str(stored / "taps"), str(stored.parent / "sae.toml"), "--held-out", "0.3"]
        settings = ["--sae.folder", f"epochs{epochs}", "--sae.points=['*.1.resid_post']"]
        words = ["inside", "sae", *files, "--epochs", epochs, *settings]
        assert main(words) == 0
        config = json.loads((stored / f"epochs{epochs}/layers.1.resid_post/cfg.json").read_text())
        found.append(config["metadata"]["last"]["explained_variance"])
    assert found[1] > found[0] + 0.1
    out = capsys.readouterr().out.splitlines()
    last = max(number for number, line in enumerate(out) if line.startswith("point"))
    header, row = out[last : last + 2]
    assert header.split() == ["point", "latents", "rows", "updates", "explained", "variance", "L0", "dead"]
    assert row.split()[:2] == ["layers.1.resid_post", "24"]
    assert int(row.split()[2]) < 6 * 8 * 64


def test_json_has_the_figures_that_are_written(stored, capsys):
    files = [str(stored / "taps"), str(stored.parent / "sae.toml"), "--sae.points=['*.1.resid_post']"]
    for held_out, folder in (("0.3", "some"), ("0", "none")):
        words = ["inside", "sae", *files, "--held-out", held_out, f"--out={stored / folder}", "--json"]
        assert main(words) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["samples"], facts["out"]) == (str(stored / "taps"), str(stored / folder))
        [row] = facts["points"]
        assert (row["point"], row["latents"]) == ("layers.1.resid_post", 24)
        written = json.loads((stored / folder / row["point"] / "cfg.json").read_text())["metadata"]["last"]
        assert row["explained_variance"] == written.get("explained_variance")
        assert row["l0"] == written.get("l0")
    assert row["l0"] is None, "nothing was held out"


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["{run}", "--sae.latents=8"], ["sae.activation", "k = 32", "8 latents"]),
        (["{run}", "--sae.latent=8"], ["'latents'"]),
        (["{run}"], ["/sae", "empty"]),
        (["{run}", "--sae.points=['*.z']", "--out={run}/y"], ["*.z", "layers.0.mlp_out"]),
        (["{run}/sae"], ["/sae", "samples"]),
        (["{run}", "--sae.type=store"], ["[sae]", "Store", "type"]),
        (["{run}", "--sae.expansion=1", "--out={run}/y"], ["layers.0.", "16 features", "k = 32", "16 latents"]),
    ],
)
def test_mistakes_are_named(stored, capsys, arguments, facts):
    assert main(["inside", "sae", *(each.format(run=stored) for each in arguments)]) != 0
    assert not lacks(capsys.readouterr().err, *facts)


def test_steps_that_lack_a_point_are_left_out(stored, tmp_path, capsys):
    """As where a point is of images, and a step had none."""
    shutil.copytree(stored / "taps", tmp_path / "taps")
    steps = steps_of(tmp_path)
    lacking(steps[0], "layers.1.resid_post")
    arguments = ["inside", "sae", str(tmp_path), str(stored.parent / "sae.toml"), "--held-out", "0"]
    assert main([*arguments, "--out", str(tmp_path / "saes")]) == 0
    rows = {row.split()[0]: int(row.split()[2]) for row in capsys.readouterr().out.splitlines() if ".resid_post" in row}
    assert rows["layers.1.resid_post"] == rows["layers.0.resid_post"] * (len(steps) - 1) / len(steps)
    for step in steps[1:]:
        lacking(step, "layers.0.resid_post")
    lacking(steps[0], "layers.0.mlp_out")
    transcoder = ["--sae.points=['layers.0.*']", "--sae.output=resid_post", f"--out={tmp_path / 'none'}"]
    assert main([*arguments, *transcoder]) != 0
    assert not lacks(capsys.readouterr().err, "layers.0.mlp_out", "layers.0.resid_post", "no step")


def lacking(step, point):
    """Take a point out of a step, as if nothing had passed it."""
    manifest = manifest_of(step)
    files = {name: entry for name, entry in manifest["files"].items() if name != f"{point}.safetensors"}
    (step / "taps.json").write_text(json.dumps({**manifest, "files": files}))
    (step / f"{point}.safetensors").unlink()


@pytest.mark.parametrize("share", ["1", "-0.1", "nan"])
def test_a_share_that_leaves_nothing_to_train_on_is_refused(capsys, share):
    with pytest.raises(SystemExit) as ended:
        main(["inside", "sae", "runs/run", f"--held-out={share}"])
    assert ended.value.code == 2
    assert not lacks(capsys.readouterr().err, "--held-out", 0, 1)
