"""A folder in a bucket: uploads that are checked, downloads, listings, deletions, each tried more than once."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import inspect
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

from forge_core import CheckpointError, report_progress

T = TypeVar("T")
LONGEST_PAUSE_S = 60.0
MOST_PARTS = 10_000
"""Parts that S3 takes of one object."""
BLOCK = 1 << 24
LEAST_RATE = 1 << 18
"""Bytes a second; a transfer that is slower than this counts as one that stands still."""
PATIENT = 10
"""How many times `timeout_s` a listing may take, which is many requests."""
SLICE_S = 0.25


class _Progress(Callback):  # type: ignore[misc]  # fsspec has no types
    """Reports to the watchdog that bytes move, and counts for the deadline of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.moves = 0

    def relative_update(self, inc: int = 1) -> None:
        self.moves += 1
        report_progress("transferring")


class Bucket:
    """Objects under a URL. All paths are relative to it. Safe to use from several threads.

    Errors of the store are raised as `CheckpointError`s with the object's URL, once all attempts have failed; that an
    object is not there is a `FileNotFoundError` at once.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        *,
        parallel: int = 8,
        part: int = 64 << 20,
        retries: int = 5,
        backoff_s: float = 1.0,
        timeout_s: float = 60.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._parallel, self._part, self._retries, self._backoff_s = parallel, part, retries, backoff_s
        self._timeout_s = timeout_s
        # No listing is kept: other ranks, and other machines, write here
        settings: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        self._is_s3 = url.startswith(("s3://", "s3a://"))
        if self._is_s3:
            # One attempt each: else three layers would try, and a store that is down be noticed after an hour
            config = {"connect_timeout": timeout_s, "read_timeout": timeout_s, "retries": {"total_max_attempts": 1}}
            settings["config_kwargs"] = {**config, **options.get("config_kwargs", {})}
        self._fs, self._root = url_to_fs(self.url, **{**options, **settings})
        if self._is_s3:
            self._fs.retries = 1
        self._etags_are_md5 = True

    def _attempt(self, path: str, action: Callable[[], T], what: str) -> T:
        for attempt in range(self._retries + 1):
            try:
                return action()
            except FileNotFoundError:  # an answer, which another attempt would not change
                raise
            except Exception as error:  # clients raise whatever their HTTP library raises
                if attempt == self._retries:
                    cause = f"{type(error).__name__}: {error}"
                    message = f"{self.url}/{path} could not be {what} in {attempt + 1} attempts; the last: {cause}"
                    raise CheckpointError(message) from error
                # At random, so that the ranks of a run do not come back all at once
                pause = min(self._backoff_s * 2**attempt, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)  # noqa: S311  # no secret
                report_progress("waiting for the object store")
                time.sleep(pause)
        raise AssertionError

    def _call(
        self, name: str, *args: Any, limit_s: float = 0, progress: _Progress | None = None, **settings: Any
    ) -> Any:
        """Call a method of the file system, which may stand still for `limit_s` seconds (0: `timeout_s`).

        A deadline of our own: clients' limits on connecting and reading do not cover a request that was sent and is
        never answered. A call that is given up is cancelled, where the client can.
        """
        if progress is not None:
            settings["callback"] = progress
        if self._fs.async_impl:
            coroutine = getattr(self._fs, f"_{name}")(*args, **settings)
            return self._await(asyncio.run_coroutine_threadsafe(coroutine, self._fs.loop), limit_s, progress)
        return self._await(_in_thread(lambda: getattr(self._fs, name)(*args, **settings)), limit_s, progress)

    def _await(self, future: Future[T], limit_s: float = 0, progress: _Progress | None = None) -> T:
        limit_s, moves, idle_s = limit_s or self._timeout_s, 0, 0.0
        while True:
            try:
                return future.result(timeout=min(SLICE_S, limit_s))
            except NotDone:
                if future.done():  # the call's own error
                    raise
            # In slices: time in which this process was stopped is no time of the store
            idle_s += SLICE_S
            if progress is not None and progress.moves != moves:
                moves, idle_s = progress.moves, 0.0
            if idle_s > limit_s:
                future.cancel()
                raise TimeoutError(f"the store did not answer for {limit_s:.3g} s")

    def in_parallel(self, action: Callable[[str], T], items: Sequence[str]) -> list[T]:
        """Call `action` on each, several at a time; the first error is raised after all have ended."""
        with ThreadPoolExecutor(max(1, min(self._parallel, len(items)))) as pool:
            return list(pool.map(action, items))

    def check_access(self) -> None:
        """Write and delete an object, or raise a `CheckpointError` that names the problem."""
        # A name that no other rank has, as all of them check at the same time
        path = f".probe-{uuid.uuid4().hex}"

        def probe() -> None:
            self._make_folder(path)
            self._call("pipe_file", f"{self._root}/{path}", b"x")
            self._call("rm_file", f"{self._root}/{path}")

        try:
            self._attempt(path, probe, "written")
        except FileNotFoundError as error:  # S3's word for a bucket that does not exist
            raise CheckpointError(f"{self.url} cannot be written: {error}") from error

    def upload(self, local: Path, path: str, threads: int = 1) -> None:
        """Put a file, and check that the store has it as it is. `threads` files are on their way at a time."""
        size = local.stat().st_size
        part = max(self._part, -(-size // MOST_PARTS))
        # Requests are shared by the files on their way
        at_once = max(1, self._parallel // threads)
        wanted = {"chunksize": part, "max_concurrency": at_once}
        # Clients take different settings, and refuse others
        put = getattr(self._fs, "_put_file", self._fs.put_file)
        known = inspect.signature(put).parameters
        settings: dict[str, Any] = {name: value for name, value in wanted.items() if name in known}
        # Until the first part has arrived, or the whole file of a client that sends it in one piece, nothing moves
        settings["limit_s"] = self._timeout_s + min(size, part * at_once if "chunksize" in known else size) / LEAST_RATE
        attempts = 0

        def put_once() -> None:
            nonlocal attempts
            attempts += 1
            target = f"{self._root}/{path}"
            if self._on_disk:  # where a copy that is cut short would look like a file
                self._make_folder(path)
                self._call("put_file", str(local), f"{target}.part", limit_s=settings["limit_s"])
                os.replace(f"{target}.part", target)
            else:
                self._call("put_file", str(local), target, progress=_Progress(), **settings)
            self._check(local, path, size, part)

        try:
            self._attempt(path, put_once, "uploaded")
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.url}/{path} could not be uploaded: {error}") from error
        if attempts > 1:  # one of them may have begun an upload in parts whose id never came back
            self._attempt(path, lambda: self._abort_uploads(path), "cleared")

    def _check(self, local: Path, path: str, size: int, part: int) -> None:
        info = self._call("info", f"{self._root}/{path}")
        if info["size"] != size:
            raise OSError(f"the store has {info['size']} bytes of it, not {size}")
        stored = _stored_md5(info)
        if stored and self._etags_are_md5 and stored != _md5(local, part, in_parts="-" in stored):
            # Encrypted by a key of the user's, S3 answers with something else than an MD5: so read it once
            stored_bytes = _in_thread(lambda: _digest(self._fs, f"{self._root}/{path}"))
            if self._await(stored_bytes, self._timeout_s + size / LEAST_RATE) != _digest(None, str(local)):
                raise OSError("the store has other bytes than were sent")
            self._etags_are_md5 = False

    def download(self, path: str, local: Path) -> None:
        """Get an object; `local` appears only when it is whole."""
        unfinished = local.with_name(f"{local.name}.{uuid.uuid4().hex}.part")

        def get() -> None:
            source = f"{self._root}/{path}"
            # S3's client reports each block; of others it is not known
            size = BLOCK if self._is_s3 else self._call("info", source)["size"]
            limit_s = self._timeout_s + size / LEAST_RATE
            self._call("get_file", source, str(unfinished), limit_s=limit_s, progress=_Progress())

        try:
            self._attempt(path, get, "downloaded")
            unfinished.replace(local)
        finally:
            unfinished.unlink(missing_ok=True)

    def folders(self) -> list[str]:
        """Names of the folders in it; empty if there is nothing."""
        try:
            found = self._attempt("", lambda: self._listing("ls", self._root), "listed")
        except FileNotFoundError:
            return []
        return [entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"]

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        try:
            # Not fsspec's `exists`, which some clients answer with False after any error
            self._attempt(path, lambda: self._call("info", f"{self._root}/{path}"), "looked for")
        except FileNotFoundError:
            return False
        return True

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each object of a folder, by name."""
        root = f"{self._root}/{folder}"
        found = self._attempt(folder, lambda: self._listing("find", root, withdirs=False), "listed")
        return {entry["name"].rpartition("/")[2]: entry["size"] for entry in found.values()}

    def _listing(self, name: str, folder: str, **settings: Any) -> Any:
        return self._call(name, folder, detail=True, limit_s=PATIENT * self._timeout_s, **settings)

    def remove(self, path: str) -> None:
        """Delete an object, if it is there."""
        try:
            self._attempt(path, lambda: self._call("rm_file", f"{self._root}/{path}"), "deleted")
        except FileNotFoundError:
            return

    def remove_folder(self, folder: str) -> None:
        """Delete all objects of a folder, and what uploads that were cut short have left of it."""
        self._attempt(folder, lambda: self._abort_uploads(f"{folder}/"), "cleared")
        if self._on_disk:
            with_folder = f"{self._root}/{folder}"
            if self._fs.exists(with_folder):
                self._fs.rm(with_folder, recursive=True)
            return
        names = list(self.sizes(folder))
        self.in_parallel(lambda name: self.remove(f"{folder}/{name}"), names)

    def unfinished_uploads(self, prefix: str = "") -> list[tuple[str, str]]:
        """Keys and ids of uploads in parts that were begun and not finished. They are paid for, and in no listing."""
        # Only S3 keeps them for ever: Google's and Azure's are forgotten after a week
        if not self._is_s3:
            return []
        bucket, _, key = self._root.partition("/")
        query: dict[str, Any] = {"Bucket": bucket, "Prefix": f"{key}/{prefix}"}
        found: list[tuple[str, str]] = []
        while True:
            answer = self._call("call_s3", "list_multipart_uploads", **query)
            found += [(entry["Key"], entry["UploadId"]) for entry in answer.get("Uploads", ())]
            if not answer.get("IsTruncated"):
                return found
            query |= {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def _abort_uploads(self, prefix: str) -> None:
        bucket = self._root.partition("/")[0]
        for key, upload in self.unfinished_uploads(prefix):
            self._call("call_s3", "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)

    def abort_uploads(self) -> None:
        """Remove what uploads that were cut short have left anywhere in it."""
        self._attempt("", lambda: self._abort_uploads(""), "cleared")

    @property
    def _on_disk(self) -> bool:
        return self.url.startswith(("file://", "local://"))

    def _make_folder(self, path: str) -> None:
        if self._on_disk:
            os.makedirs(os.path.dirname(f"{self._root}/{path}"), exist_ok=True)


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """The result of a function in a separate thread; not of an executor, which the interpreter waits for at exit."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            result = function()
        # Of any kind: else the caller would wait for a result until its time is over
        except BaseException as error:
            if not future.cancelled():
                future.set_exception(error)
        else:
            if not future.cancelled():
                future.set_result(result)

    Thread(target=work, name="forge-object-store", daemon=True).start()
    return future


def _stored_md5(info: Mapping[str, Any]) -> str:
    """The store's MD5 of an object as hexadecimal digits, with `-N` for N parts as S3 writes it; empty if unknown."""
    if md5 := info.get("md5Hash"):  # Google's
        return base64.b64decode(md5).hex()
    etag = str(info.get("ETag", "")).strip('"')
    return etag if re.fullmatch(r"[0-9a-f]{32}(-\d+)?", etag) else ""


def _md5(local: Path, part: int, in_parts: bool) -> str:
    """The MD5 of a file; with `in_parts`, the MD5 of the MD5s of its parts, as S3 computes it."""
    digests: list[Any] = []
    # One byte more than there is, so that a whole file is a single part
    limit = part if in_parts else local.stat().st_size + 1
    with local.open("rb") as file:
        taken = limit
        while taken == limit:
            digest, taken = hashlib.md5(usedforsecurity=False), 0  # a FIPS build refuses MD5 otherwise
            while block := file.read(min(BLOCK, limit - taken)):
                digest.update(block)
                taken += len(block)
                report_progress("checking an upload")
            # Behind a whole number of parts comes an empty one, which S3 does not count
            if taken or not digests:
                digests.append(digest)
    if not in_parts:
        return digests[0].hexdigest()
    whole = hashlib.md5(b"".join(digest.digest() for digest in digests), usedforsecurity=False)
    return f"{whole.hexdigest()}-{len(digests)}"


def _digest(fs: Any, path: str) -> str:
    digest = hashlib.sha256()
    with fs.open(path, "rb") if fs is not None else open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            report_progress("checking an upload")
    return digest.hexdigest()
