"""A bit that flipped before the import is found by the digests that come with a download."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub._local_folder import write_download_metadata
from published_models import MODELS

from forge_core.cli import main
from forge_testing.refusals import lacks

COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "published"
    MODELS["llama, tied"].write(folder)
    return folder


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def etag(path: Path) -> str:
    """As the hub has them: SHA-256 of files in its large storage, the digest of Git's blob of others."""
    if path.suffix == ".safetensors":
        return sha256(path)
    return subprocess.run(["git", "hash-object", path], capture_output=True, text=True, check=True).stdout.strip()


def in_cache(model: Path, folder: Path) -> Path:
    """The folder of a snapshot in the hub's cache, whose files are links to blobs."""
    root = folder / "models--org--name"
    snapshot, blobs = root / "snapshots" / COMMIT, root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        (blobs / etag(path)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{etag(path)}")
    return snapshot


def in_local_folder(model: Path, folder: Path) -> Path:
    """As `hf download --local-dir` leaves a folder."""
    own = with_sums(model, folder)
    (own / "SHA256SUMS").unlink()
    for path in model.iterdir():
        write_download_metadata(own, path.name, COMMIT, etag(path))
    return own


def with_sums(model: Path, folder: Path) -> Path:
    own = folder / "plain"
    own.mkdir()
    for path in model.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    sums = subprocess.run(["sha256sum", *os.listdir(own)], cwd=own, capture_output=True, text=True, check=True)
    (own / "SHA256SUMS").write_text(sums.stdout)
    return own


SOURCES: dict[Callable[[Path, Path], Path], str] = {
    in_cache: "the hub's cache",
    in_local_folder: ".cache/huggingface/download",
    with_sums: "SHA256SUMS",
}


def flip(path: Path) -> None:
    """Flip a bit of the last byte, which leaves the time of the last change as it was."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def bring_in(folder: Path, run: Path) -> int:
    return main(["weights", "import", str(folder), "--out", str(run), "--no-tokenizer"])


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
@pytest.mark.parametrize("name", ["model-00002-of-00004.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_bit_that_flipped_before_the_import_is_named(model, tmp_path, capsys, source, name):
    folder = source(model, tmp_path)
    flip(folder / name)
    assert bring_in(folder, tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert not lacks(error, folder / name)
    assert f"{SOURCES[source]} has " in error
    assert not list(tmp_path.glob("run*"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
@pytest.mark.parametrize("copy", [False, True])
def test_an_intact_download_says_what_vouches_for_it(model, tmp_path, capsys, source, copy):
    folder = source(model, tmp_path)
    arguments = ["weights", "import", str(folder), "--out", str(tmp_path / "run"), "--no-tokenizer"]
    assert main([*arguments, *(["--copy"] if copy else [])]) == 0
    line = f"checksums: each file with weights has the digest that came with it ({SOURCES[source]})"
    assert line in capsys.readouterr().out
    origin = json.loads((tmp_path / "run/origin.json").read_text())
    weights = sorted(path.name for path in model.glob("*.safetensors"))
    assert origin["digests"] == dict.fromkeys(weights, SOURCES[source])
    assert origin["files"] == {name: sha256(model / name) for name in weights}
    manifest = json.loads((tmp_path / "run/checkpoints/step-0/manifest.json").read_text())
    assert {name: entry["sha256"] for name, entry in manifest["files"].items() if name in weights} == origin["files"]


def test_files_without_a_digest_are_told(model, tmp_path, capsys):
    assert bring_in(model, tmp_path / "run") == 0
    line = "checksums: no digest came with model-00001-of-00004.safetensors and 3 more, so a bit that flipped before"
    assert line in capsys.readouterr().out
    assert set(json.loads((tmp_path / "run/origin.json").read_text())["digests"].values()) == {None}


def test_a_configuration_that_was_edited_after_its_download_is_taken(model, tmp_path):
    folder = in_local_folder(model, tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 128', '"max_position_embeddings": 64'))
    os.utime(config, (later := config.stat().st_mtime + 60, later))
    assert bring_in(folder, tmp_path / "run") == 0


def test_a_list_of_digests_that_is_none_is_refused(model, tmp_path, capsys):
    folder = with_sums(model, tmp_path)
    (folder / "SHA256SUMS").write_text("abc  config.json\n")
    assert bring_in(folder, tmp_path / "run") == 2
    assert not lacks(capsys.readouterr().err, "SHA256SUMS, line 1", "'abc  config.json'", "SHA-256")
