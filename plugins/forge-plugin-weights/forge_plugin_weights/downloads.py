"""Digests that came with a folder's files, by which a bit is found that flipped before the import.

The hub's cache names a file, to which a symbolic link points, by its digest; `hf download --local-dir` keeps digests in
`.cache/huggingface/download`; and anybody may put a file `SHA256SUMS` beside others. The hub's digest is SHA-256 for
large files, and the SHA-1 of the Git blob for others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from forge_core.contracts.errors import JobError

SUMS = "SHA256SUMS"
METADATA = ".cache/huggingface/download"
SHA256, GIT_SHA1 = (re.compile(f"[0-9a-f]{{{length}}}") for length in (64, 40))
SMALL = ("*.json", "*.model", "*.txt", "*.jinja")
"""Files beside the weights that an import reads: configuration and tokenizer."""


@frozen
class KnownDigest:
    """A digest of a file that came with it."""

    value: str
    """Hexadecimal."""
    source: str
    """Where it was found."""
    edited: bool = False
    """Whether the file was changed after its download, as somebody who changes its configuration does."""


def known_digests(path: Path, sums: Mapping[str, str]) -> Sequence[KnownDigest]:
    """Returns the known digests of a file; `sums` has the digests in `SHA256SUMS`, by name."""
    known = []
    if path.name in sums:
        known.append(KnownDigest(sums[path.name], SUMS))
    blob = path.resolve()
    if path.is_symlink() and blob.parent.name == "blobs" and _is_digest(blob.name):
        known.append(KnownDigest(blob.name, "the hub's cache"))
    metadata = path.parent / METADATA / f"{path.name}.metadata"
    if metadata.is_file():
        # Commit, ETag and time of the download, a line each; filled up, as the file may be cut off
        _, etag, saved, *_ = [*metadata.read_text().split("\n"), "", "", ""]
        if _is_digest(etag):
            edited = path.stat().st_mtime - 1 > _number(saved)  # a second, as `huggingface_hub` allows
            known.append(KnownDigest(etag, METADATA, edited))
    return known


def _is_digest(text: str) -> bool:
    return bool(SHA256.fullmatch(text) or GIT_SHA1.fullmatch(text))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def read_sums(folder: Path) -> Mapping[str, str]:
    """Returns the digests in `SHA256SUMS`, by name of file; none if there is no such file.

    Raises:
        JobError: a line is not what `sha256sum` writes.
    """
    path = folder / SUMS
    if not path.is_file():
        return {}
    sums = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        digest, _, name = line.strip().partition(" ")
        if not line.strip():
            continue
        if not SHA256.fullmatch(digest.lower()) or not name.strip():
            raise JobError(
                f"{path}, line {number}: {line!r} is no SHA-256 with the name of a file, as sha256sum writes"
            )
        # `sha256sum` marks files that it read in binary mode by `*`.
        sums[name.strip().removeprefix("*").removeprefix("./")] = digest.lower()
    return sums


def check_small_files(folder: Path) -> None:
    """Check the configuration and the tokenizer against their known digests.

    One that was changed since its download is left out, since people change them on purpose.

    Raises:
        JobError: some are damaged; names each.
    """
    sums = read_sums(folder)
    files = sorted(path for pattern in SMALL for path in folder.glob(pattern) if path.is_file())
    _raise_faults(_fault(path, known, "") for path in files for known in known_digests(path, sums) if not known.edited)


def check_weights(folder: Path, digests: Mapping[Path, str]) -> dict[str, str | None]:
    """Check the files with weights against their known digests.

    Args:
        folder: their own.
        digests: SHA-256 of each.

    Returns:
        Where a digest was found that it equals, by name of file; None if there is none.

    Raises:
        JobError: some are damaged; names each.
    """
    sums = read_sums(folder)
    # Also files that were changed after their download: few people change weights by hand.
    known = {path: known_digests(path, sums) for path in digests}
    _raise_faults(_fault(path, digest, digests[path]) for path, found in known.items() for digest in found)
    return {path.name: " and ".join(digest.source for digest in found) or None for path, found in known.items()}


def _fault(path: Path, known: KnownDigest, sha256: str) -> str:
    """Describes the damage to a file; empty if there is none. `sha256` is empty if it has not been computed."""
    if GIT_SHA1.fullmatch(known.value):
        kind, value = "Git SHA-1", _git_sha1(path)
    else:
        kind, value = "SHA-256", sha256 or hashlib.sha256(path.read_bytes()).hexdigest()  # of small files
    if value == known.value:
        return ""
    advice = f"; download it again, or if the change is yours, remove its entry from {known.source}"
    return f"{path} is damaged: its {kind} is {value[:12]}…, and {known.source} has {known.value[:12]}…{advice}"


def _git_sha1(path: Path) -> str:
    """The digest by which Git identifies a file's content."""
    # Python in FIPS mode refuses SHA-1 that may be for security.
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _raise_faults(faults: Iterable[str]) -> None:
    if found := [fault for fault in faults if fault]:
        raise JobError("; ".join(found))


def checksum_line(known: Mapping[str, str | None]) -> str:
    """Returns in words which files were held against a digest that came with them."""
    without = [name for name, source in known.items() if source is None]
    if not without:
        sources = ", ".join(sorted({source for source in known.values() if source}))
        return f"checksums: each file with weights has the digest that came with it ({sources})"
    names = without[0] + (f" and {len(without) - 1} more" if len(without) > 1 else "")
    return (
        f"checksums: no digest came with {names}, so a bit that flipped before cannot be noticed; "
        f"a file {SUMS} beside them would have one"
    )
