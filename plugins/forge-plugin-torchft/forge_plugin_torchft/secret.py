"""The secret that groups of one job share: who does not have it gets no state.

It is `FORGE_GROUP_SECRET`, or else a file in the cache that the first group makes and only its user can read: groups of
one machine, and of one user on a shared home folder, then have it without a setting.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from forge_core.contracts.errors import ForgeError
from forge_kit.data.cache import cache_root

VARIABLE = "FORGE_GROUP_SECRET"
FILE = "group-secret"
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


def is_loopback(host: str) -> bool:
    """Whether a name or address is of this machine alone."""
    return host in LOOPBACK or host.startswith("127.")


def group_secret() -> bytes:
    """Returns the secret of this user's groups.

    Raises:
        ForgeError: the cache cannot be written, and the environment has none.
    """
    if text := os.environ.get(VARIABLE, ""):
        return text.encode()
    path = cache_root() / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{FILE}.{secrets.token_hex(4)}")
        try:
            # Readable by this user alone from its first byte on
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            os.link(unfinished, path)  # fails if another group was first: its secret counts
        except FileExistsError:
            pass
        finally:
            unfinished.unlink(missing_ok=True)
        return Path(path).read_bytes()
    except OSError as error:
        raise ForgeError(
            f"{path}: {error.strerror}; set {VARIABLE} to a random text, the same for all groups"
        ) from error


def proof(secret: bytes, subject: str) -> str:
    """Returns what shows that its sender has the secret, without sending it."""
    return hmac.new(secret, subject.encode(), hashlib.sha256).hexdigest()
