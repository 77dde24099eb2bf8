"""Models by their name on the Hugging Face hub: fetched into its cache, which keeps whole files, and pushed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_core.contracts.errors import JobError
from forge_plugin_weights.gguf_files import is_gguf
from forge_plugin_weights.pixels import PROCESSOR_FILES

NAME = re.compile(r"[\w.-]+/[\w.-]+")
INSTALL = 'pip install "forge-plugin-weights[hub]"'
CONFIGURATION = ("config.json", *PROCESSOR_FILES)
FETCHED = (
    *CONFIGURATION,
    *("generation_config.json", "SHA256SUMS", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json", "*.jinja", "*.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json"),
)
"""Files that an import reads; repositories also have pickles, and the weights in other formats."""
LEFT = ("*/*.safetensors", "*/*.json", "*/*.model", "*/*.txt", "consolidated*")
"""The weights a second time, such as in `original/`."""


def is_name(path: Path) -> bool:
    """Whether a path can only be a name on the hub: it is not there, and of that form, as is a relative path."""
    return bool(NAME.fullmatch(str(path))) and not is_gguf(path) and not path.exists() and not path.parent.exists()


def fetched(name: str, revision: str = "", *, weights: bool = True) -> Path:
    """Returns the folder, in the cache of the hub, with a model's files, which are fetched if they are not there.

    A connection that breaks is resumed, and whole files are not fetched again. An import verifies the files by their
    digests, which name them there.

    Args:
        name: `ORG/NAME`.
        revision: branch, tag or commit; empty: the default branch.
        weights: whether to fetch more than the configuration.

    Raises:
        JobError: the hub cannot be reached, or has no such model.
    """
    hub = _library(name)
    with _explained(name):
        options = {"revision": revision} if revision else {}
        patterns = FETCHED if weights else CONFIGURATION
        folder = hub.snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=list(LEFT), **options)
    return Path(folder)


def check_pushable(name: str) -> None:
    """Check the name of a repository to push to, before an export that takes long.

    Raises:
        JobError: it is no such name, or `huggingface_hub` is missing, offline, or without a token.
    """
    if not NAME.fullmatch(name):
        raise JobError(f"--push {name}: a repository is named ORG/NAME")
    hub = _library(name)
    if hub.constants.HF_HUB_OFFLINE:
        raise JobError(f"--push {name}: the hub is not used while HF_HUB_OFFLINE is set; unset it")
    if hub.get_token() is None:
        raise JobError(f"--push {name}: there is no token of the hub; set HF_TOKEN, or run: hf auth login")


def push(folder: Path, name: str, *, public: bool = False) -> str:
    """Upload an export; returns the address of the repository, which is made if it does not exist.

    Args:
        folder: the export.
        name: `ORG/NAME`.
        public: whether a repository that is made is public.

    Raises:
        JobError: it could not be uploaded; the folder stays.
    """
    hub = _library(name)
    try:
        api = hub.HfApi()
        url = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Export of forge-run weights",
            # Files of an earlier push that this one does not have, as there are fewer of them
            delete_patterns=["*.safetensors", "*.safetensors.index.json"],
        )
    except Exception as error:  # of the library and its client, in many classes
        again = f"the export is in {folder}; push it with: hf upload {name} {folder}"
        raise JobError(f"--push {name}: {_one_line(error)}; {again}") from error
    return str(url)


def origin_of_hub(folder: Path) -> dict[str, str]:
    """Returns name and commit of a model in the cache of the hub; empty for any other folder."""
    repository, commit = folder.parent.parent.name, folder.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return {}
    return {"name": repository.removeprefix("models--").replace("--", "/"), "commit": commit}


def _library(name: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        message = f"there is no folder {name}, and a name on the Hugging Face hub needs huggingface_hub: {INSTALL}"
        raise JobError(message) from None
    return huggingface_hub


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """A context in which errors of the hub become a line that names what was tried."""
    from huggingface_hub import constants

    try:
        yield
    except Exception as error:
        tried = f"there is no folder {name}, and as a name on the hub it cannot be fetched"
        if constants.HF_HUB_OFFLINE:
            raise JobError(f"{tried}: HF_HUB_OFFLINE is set, and not all of it is in the cache; unset it") from error
        hint = "check the name, the network and, for private or gated models, HF_TOKEN"
        raise JobError(f"{tried}: {_one_line(error)}; {hint}") from error


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
