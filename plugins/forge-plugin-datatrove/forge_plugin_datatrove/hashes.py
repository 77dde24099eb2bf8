"""Whether datatrove can use the installed library of hashes."""

from __future__ import annotations

from importlib.metadata import version

from datatrove.utils.hashing import HashConfig, create_hash_func

from forge_core.contracts.errors import JobError


def demand_hashes() -> None:
    """Raises `JobError` where the installed xxhash is one that datatrove cannot use."""
    try:
        create_hash_func(HashConfig())("text")
    except TypeError as error:
        # xxhash 4 takes bytes alone, and datatrove hashes texts
        raise JobError(f"xxhash {version('xxhash')} is too new for datatrove: pip install 'xxhash<4'") from error
