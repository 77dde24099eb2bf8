"""Files of features: one of safetensors for each image, with a checksum, in one folder for each tower."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from forge_core import ForgeError
from forge_core.files import write_atomically
from forge_kit.data.cache import digest_of

logger = logging.getLogger(__name__)

FEATURES, CHECKSUM = "features", "checksum"
"""Tensors of a file: (1 + K, patches, W) in the compute dtype, and (32) uint8."""
DESCRIPTION = "tower.json"


class _Damaged(Exception):
    """Reason that a file cannot be used."""


class FeatureFiles:
    """The features of one tower. Other ranks and other runs may read and write the same files at any time."""

    def __init__(self, root: Path, tower: Mapping[str, Any], keep_free: int) -> None:
        """Opens the folder below `root` for a tower, which is made if there is none.

        Args:
            root: folder of all towers.
            tower: everything that features depend on other than the image; plain JSON.
            keep_free: bytes to be left free on the file system.
        """
        self.folder = root / digest_of("features", dict(tower))[:32]  # 128 bits
        self._keep_free = keep_free
        self.damaged = 0
        """Files that were found damaged since this was last set to 0."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / DESCRIPTION).exists():  # for people; the name of the folder is what counts
                write_atomically(self.folder / DESCRIPTION, json.dumps(tower, indent=1).encode())
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def path(self, key: str) -> Path:
        """Returns the file of an image; `key` is its digest in hex."""
        # 256 subfolders: with millions of files in one, some file systems become slow.
        return self.folder / key[:2] / f"{key[2:]}.safetensors"

    def read(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Returns the features of an image, in the host's memory; None: there are none, or they are damaged."""
        path = self.path(key)
        try:
            return _features_in(_content(path), key, shape, dtype)
        except FileNotFoundError:
            return None
        except _Damaged as reason:
            self.damaged += 1
            logger.warning("features in %s are damaged (%s); computing them again", path, reason)
            return None

    def write(self, key: str, features: Tensor) -> bool:
        """Keep the features of an image (1 + K, patches, W); returns whether there was space for them.

        Raises:
            ForgeError: the file cannot be written.
        """
        path, features = self.path(key), features.contiguous()
        checksum = torch.tensor(list(_checksum(key, features)), dtype=torch.uint8)
        # Another name for each writer, as ranks may keep the same image at once
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
        try:
            # For each file, as others fill the disk, too
            if shutil.disk_usage(self.folder).free < self._keep_free + features.nbytes:
                return False
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(save({FEATURES: features, CHECKSUM: checksum}))
            # Whole or not at all for every reader, and not synced, which would take longer than many towers do: what
            # a crash of the machine leaves half written has another checksum.
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise _cannot_write(path, error) from error
        return True


def _content(path: Path) -> bytes:
    """Returns a file's bytes; raises `_Damaged` if there is one that cannot be read."""
    try:
        return path.read_bytes()
    # It is an OSError as well, and no damage.
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _Damaged(error.strerror) from error


def _features_in(data: bytes, key: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns the features in the bytes of a file; raises `_Damaged` if they do not belong to this image."""
    try:
        tensors = load(data)
        features, checksum = tensors[FEATURES], bytes(tensors[CHECKSUM].tolist())
    except (SafetensorError, KeyError) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from error
    if (list(features.shape), features.dtype) != (list(shape), dtype):
        raise _Damaged(f"{features.dtype} {list(features.shape)}, not {dtype} {list(shape)}")
    if checksum != _checksum(key, features):
        raise _Damaged("its checksum is another")
    return features


def _checksum(key: str, features: Tensor) -> bytes:
    """SHA-256 of the image's key and its features: a file under another name is damaged, too."""
    digest = hashlib.sha256(key.encode())
    digest.update(features.view(torch.uint8).numpy().data)  # numpy has no bfloat16
    return digest.digest()


def _cannot_write(path: Path, error: OSError) -> ForgeError:
    hint = "free space, or name another folder by plugins.features.path"
    return ForgeError(f"cannot keep features in {path}: {error.strerror}; {hint}")
