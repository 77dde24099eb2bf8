"""Names on the hub, by a server of this machine that answers as the hub does, and by a stand-in for uploads."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from published_models import MODELS

from forge_core.cli import main
from forge_core.contracts.errors import JobError
from forge_plugin_weights.importing import import_folder
from forge_testing.refusals import lacks

COMMIT = "0123456789" * 4
FURTHER = {"pytorch_model.bin": b"pickle", "original/consolidated.safetensors": b"twice", "notes.md": b"notes"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "published"
    MODELS["llama, tied"].write(folder)
    for name, content in FURTHER.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def hub(model, tmp_path, monkeypatch) -> Iterator[SimpleNamespace]:
    """A hub with one model, `org/tiny`; `fetched` lists the files that were sent."""
    state = SimpleNamespace(fetched=[], damaged="", missing="", cache=tmp_path / "cache")
    files = {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/org/tiny/revision/"):
                siblings = [{"rfilename": name} for name in files]
                return self.send(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode(), {})
            if path.startswith(f"/api/models/org/tiny/tree/{COMMIT}"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()
                ]
                return self.send(json.dumps(tree).encode(), {})
            prefix = f"/org/tiny/resolve/{COMMIT}/"
            name = path.removeprefix(prefix)
            if not path.startswith(prefix) or name not in files or name == state.missing:
                return self.send(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)
            data = files[name]
            headers = {"ETag": f'"{digest(name, data)}"', "X-Repo-Commit": COMMIT}
            if self.command == "GET":
                state.fetched.append(name)
            if name == state.damaged:
                data = data[:-1] + bytes([data[-1] ^ 1])
            return self.send(data, headers)

        def send(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(state.cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", address)
    monkeypatch.chdir(tmp_path)
    yield state
    server.shutdown()
    server.server_close()


def digest(name: str, data: bytes) -> str:
    """As the hub has them: SHA-256 in its large storage, the digest of Git's blob for others."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def test_a_name_is_fetched_and_its_digests_are_checked(hub, model, capsys):
    assert main(["weights", "inspect", "org/tiny"]) == 0
    assert set(hub.fetched) == {"config.json"}, "all that inspect reads"
    words = ["weights", "import", "org/tiny", "--no-tokenizer", "--out"]
    assert main([*words, "run"]) == 0
    assert "the digest that came with it (the hub's cache)" in capsys.readouterr().out
    names = set(hub.fetched)
    assert not names & FURTHER.keys()
    assert {path.name for path in model.glob("*.safetensors*")} < names
    origin = json.loads(Path("run/origin.json").read_text())
    assert origin["hub"] == {"name": "org/tiny", "commit": COMMIT}
    assert main(["weights", "export", "run", "--out", "out"]) == 0
    assert not lacks(Path("out/README.md").read_text(), "base_model: org/tiny\n", f"org/tiny at {COMMIT}")
    count = len(hub.fetched)
    assert main([*words, "again", "--revision", COMMIT]) == 0
    assert len(hub.fetched) == count, "all of it is in the cache"


def test_after_an_interruption_only_what_is_missing_is_fetched(hub, model, capsys):
    words = ["weights", "import", "org/tiny", "--no-tokenizer", "--out", "run"]
    hub.missing = sorted(path.name for path in model.glob("*.safetensors"))[1]
    assert main(words) == 2
    assert "cannot be fetched" in capsys.readouterr().err
    assert not Path("run").exists()
    before, hub.missing = set(hub.fetched), ""
    hub.fetched.clear()
    assert main(words) == 0
    again = set(hub.fetched)
    assert again.isdisjoint(before), "whole files are kept"
    assert "model-00002-of-00004.safetensors" in again


def test_a_bit_that_flips_on_the_way_is_found(hub, model, capsys):
    hub.damaged = sorted(path.name for path in model.glob("*.safetensors"))[0]
    assert main(["weights", "import", "org/tiny", "--no-tokenizer", "--out", "run"]) == 2
    assert not lacks(capsys.readouterr().err, "is damaged", hub.damaged)
    assert not Path("run").exists()


def test_what_cannot_be_fetched_is_one_line(hub, model, capsys, monkeypatch):
    words = ["weights", "import", "org/none", "--no-tokenizer", "--out", "run"]
    assert main(words) == 2
    assert not lacks(error := capsys.readouterr().err, "no folder org/none", "HF_TOKEN")
    assert error.count("\n") == 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(words) == 2
    assert not lacks(error := capsys.readouterr().err, "no folder org/none", "HF_HUB_OFFLINE is set")
    assert error.count("\n") == 1
    assert main(["weights", "import", str(model), "--no-tokenizer", "--out", "run", "--revision=main"]) == 2
    assert "--revision main" in capsys.readouterr().err
    with pytest.raises(JobError, match=r"no folder org/none; .* fetched by: forge-run weights import org/none"):
        import_folder(Path("org/none"), Path("run"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(words) == 2
    assert 'pip install "forge-plugin-weights[hub]"' in capsys.readouterr().err


class Uploads:
    """What the hub's class for its API is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict]] = []
        self.error: Exception | None = None

    def create_repo(self, name: str, **options) -> str:
        self.calls.append((name, options))
        return f"https://hub/{name}"

    def upload_folder(self, **options) -> None:
        if self.error:
            raise self.error
        self.calls.append((options.pop("repo_id"), options))


def test_an_export_is_pushed_with_its_card(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["weights", "import", str(model), "--no-tokenizer", "--out", "run"]) == 0
    uploads = Uploads()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: uploads)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    export = ["weights", "export", "run", "--out", "out"]
    refused = {"--push=tiny": "ORG/NAME", "--push=me/tiny": "HF_TOKEN", "--public": "--push"}
    for option, fact in refused.items():
        assert main([*export, option]) == 2
        assert fact in capsys.readouterr().err
        assert not Path("out").exists()
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    assert main([*export, "--push", "me/tiny"]) == 0
    assert "pushed to https://hub/me/tiny" in capsys.readouterr().out
    (made, made_options), (name, options) = uploads.calls
    assert (made, made_options) == ("me/tiny", {"private": True, "exist_ok": True})
    assert name == "me/tiny"
    assert {"README.md", "config.json", "model.safetensors"} <= {path.name for path in options["folder_path"].iterdir()}
    assert "*.safetensors" in options["delete_patterns"], "shards of an earlier, larger push"
    assert main([*export[:-1], "public", "--push=me/tiny", "--public", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pushed"] == "https://hub/me/tiny"
    assert uploads.calls[2][1]["private"] is False
    uploads.error = ConnectionError("reset\nby peer")
    assert main([*export[:-1], "kept", "--push=me/tiny"]) == 2
    assert not lacks(error := capsys.readouterr().err, "reset by peer", "hf upload me/tiny kept")
    assert error.count("\n") == 1
    assert Path("kept/model.safetensors").is_file()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main([*export[:-1], "offline", "--push=me/tiny"]) == 2
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err
    assert not Path("offline").exists()
