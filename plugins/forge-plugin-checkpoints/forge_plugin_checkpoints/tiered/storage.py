"""Checkpoints in memory: `step-N` in a folder of each machine, with its ranks' files and its neighbours' files.

Every machine has the manifest. A step is available when every file in its manifest is on some machine of the run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from attrs import define, field, frozen

from forge_core import CheckpointError, report_progress
from forge_core.checkpoint.manager import Checkpoints
from forge_core.checkpoint.ranks import Ranks
from forge_core.checkpoint.storage import MANIFEST, UNFINISHED, read_manifest, write_file
from forge_core.contracts.runtime import SpreadStorage, State, Storage
from forge_plugin_checkpoints.tiered import this_node
from forge_plugin_checkpoints.tiered.exchange import Exchange, Peer
from forge_plugin_checkpoints.tiered.memory import check_room

if TYPE_CHECKING:
    from forge_core.job import CheckpointSection

BLOCK = 1 << 24
BY_SAVE = ("format", "step", "time", "files")
"""Entries of a manifest that every save rewrites."""


@define
class _InMemory:
    """A checkpoint in memory."""

    digest: str = ""
    """SHA-256 of its manifest; empty: whichever is on this machine."""
    holders: Mapping[str, Sequence[int]] = field(factory=dict)
    """For each file the ranks to ask for it, one for each machine that has it."""


@frozen
class _Verdict:
    """The report of a machine on a step whose manifest it has."""

    time: float
    missing: Sequence[str]
    """Files that no machine has."""


class TieredStorage(SpreadStorage):
    """See `SpreadStorage`."""

    def __init__(self, fast: Path, durable: Storage, section: CheckpointSection, *, copies: int, every: int) -> None:
        self._fast, self._durable, self._section = fast, durable, section
        self._copies, self._every = copies, every
        self._exchange: Exchange | None = None
        self._peers: Sequence[Peer] = ()
        self._rank = 0
        self._targets: Sequence[int] = ()
        """Ranks on other machines that keep copies of this rank's files."""
        self._memory: dict[int, _InMemory] = {}
        self._durable_steps: list[int] = []
        self._checked: set[tuple[int, str]] = set()
        self._own: tuple[int, Sequence[str]] = -1, ()
        """The newest step that this rank has written, and its files."""
        self._saves, self._counted = 0, -1
        self._writing: threading.Thread | None = None
        self._fault = ""
        self._group: Any = None
        self._fits = False

    # --- available checkpoints -------------------------------------------------------------------------------------

    def join(self, gather: Callable[[Any], list[Any]]) -> None:
        """Find the steps of which all files are still available, and choose the machines that get copies.

        The first call starts this rank's server and makes a process group for saves to the durable storage.
        """
        if self._exchange is None:
            self._exchange = Exchange(this_node(), self._places, lambda step: self._unfinished(step, "copies"))
            if dist.is_initialized() and dist.get_world_size() > 1:
                # For the thread that writes to the durable storage: its messages must not mix with others'
                self._group = dist.new_group(backend="gloo")
        own = self._exchange.own
        self._peers = gather(own)
        self._rank = self._peers.index(own)
        machines: dict[str, list[int]] = {}
        for rank, peer in enumerate(self._peers):
            machines.setdefault(peer.node, []).append(rank)
        self._choose_targets(machines)
        # One rank of a machine reports for it: its ranks share the folder
        leads = self._rank == machines[own.node][0]
        held = gather(self._held() if leads else {})
        holders: dict[tuple[int, str], dict[str, list[int]]] = {}
        for rank, steps in enumerate(held):
            for key, names in steps.items():
                for name in names:
                    holders.setdefault(key, {}).setdefault(name, []).append(rank)
        verdicts: dict[tuple[int, str], _Verdict] = {}
        for judged in gather(self._judge(holders) if leads else {}):
            verdicts |= judged
        # By time: of two checkpoints of one step, as after a run that started over, the later one counts
        whole = sorted((key for key in verdicts if not verdicts[key].missing), key=lambda key: verdicts[key].time)
        self._memory = {step: _InMemory(digest, holders[step, digest]) for step, digest in whole}
        if isinstance(self._durable, SpreadStorage):
            self._durable.join(gather)
        # Rank 0's list for all, which must agree: a network file system may show other ranks other folders
        self._durable_steps = list(gather(list(self._durable.steps()) if self._rank == 0 else [])[0])
        self._checked.clear()
        self._describe_losses(verdicts)

    def _choose_targets(self, machines: Mapping[str, Sequence[int]]) -> None:
        nodes, here = list(machines), self._peers[self._rank].node
        copies, place = min(self._copies, len(nodes) - 1), nodes.index(here)
        seat = machines[here].index(self._rank)
        # A ring: machines next to each other in the order of ranks, the same seat where there is one
        rings = (machines[nodes[(place + distance) % len(nodes)]] for distance in range(1, copies + 1))
        self._targets = [ranks[seat % len(ranks)] for ranks in rings]
        if copies < self._copies:
            text = f"{copies or 'no'} cop{'ies' if copies != 1 else 'y'} of each checkpoint on other machines"
            self._warn(f"the run is on {len(nodes)} machine(s): {text}, and not {self._copies}")

    def _held(self) -> dict[tuple[int, str], list[str]]:
        """Files of committed checkpoints on this machine, by step and digest of the manifest."""
        held = {}
        for folder in self._fast.glob("step-*"):
            if folder.suffix != UNFINISHED and (folder / MANIFEST).is_file():
                try:
                    files = _read(folder)["files"]
                except CheckpointError:
                    continue  # as good as not there
                # By sizes, which take no reading: digests are compared when a file is fetched
                sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
                names = [name for name, entry in files.items() if sizes.get(name) == entry["size"]]
                held[int(folder.name.removeprefix("step-")), _sha256(folder / MANIFEST)] = [*names, MANIFEST]
        return held

    def _judge(self, holders: Mapping[tuple[int, str], Mapping[str, Any]]) -> dict[tuple[int, str], _Verdict]:
        verdicts = {}
        for step, digest in self._held():
            manifest = _read(self._fast / f"step-{step}")
            missing = [name for name in manifest["files"] if name not in holders[step, digest]]
            verdicts[step, digest] = _Verdict(manifest["time"], missing)
        return verdicts

    def _describe_losses(self, verdicts: Mapping[tuple[int, str], _Verdict]) -> None:
        steps = self.steps()
        for (step, _), verdict in sorted(verdicts.items(), key=lambda item: item[0]):
            if verdict.missing and step not in steps and (not steps or step > steps[-1]):
                files = ", ".join(verdict.missing[:3]) + (", …" if len(verdict.missing) > 3 else "")
                back = f"step {steps[-1]} is the newest that is left" if steps else "no other is left"
                self._warn(f"step {step} in memory is lost: no machine of this run has {files}; {back}")

    def steps(self) -> Sequence[int]:
        """Returns whole steps in memory and durable ones; without `join`, memory is this machine's only."""
        if self._exchange is None:  # alone: this machine's checkpoints and the durable ones
            self._durable_steps = list(self._durable.steps())
            held = {step: (digest, names) for (step, digest), names in self._held().items()}
            whole = {step: digest for step, (digest, names) in held.items() if len(names) == self._count(step)}
            self._memory = {step: _InMemory(digest) for step, digest in whole.items()}
        return sorted({*self._memory, *self._durable_steps})

    def _count(self, step: int) -> int:
        return len(_read(self._fast / f"step-{step}")["files"]) + 1

    def folder(self, step: int) -> Path:
        """Returns the folder in memory; for a step that is not there, the folder of the durable storage."""
        return self._fast / f"step-{step}" if step in self._memory else self._durable.path(step)

    # --- saving ----------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """Also reports a durable save that failed since the last call, as `on_failure` has it."""
        if fault := self._fault:
            self._fault = ""
            if self._section.on_failure == "stop":
                raise CheckpointError(fault)
            self._warn(f"{fault}. Training continues with the checkpoints in memory, and the next save tries again")
        self._memory.pop(step, None)  # a damaged one that is made again
        self._checked = {known for known in self._checked if known[0] != step}
        shutil.rmtree(self._fast / f"step-{step}", ignore_errors=True)
        for kind in ("own", "copies"):
            shutil.rmtree(self._unfinished(step, kind), ignore_errors=True)
        self._fast.mkdir(parents=True, exist_ok=True, mode=0o700)  # every user can read /dev/shm
        self._unfinished(step, "own").mkdir(parents=True)
        return self._unfinished(step, "own")

    def publish(self, step: int) -> None:
        """Copy the files of this rank to its target machines. The first call checks the memory by their true size."""
        folder = self._unfinished(step, "own")
        self._own = step, sorted(path.name for path in folder.iterdir())
        if not self._fits:
            # Of all ranks of this machine, which share its memory
            written = sum(path.stat().st_size for path in folder.parent.glob("*-own/*"))
            check_room(written, len(self._targets), held=written)
            self._fits = True
        assert self._exchange is not None or not self._targets
        for target in self._targets:
            peer = self._peers[target]
            for name in self._own[1]:
                try:
                    cast(Exchange, self._exchange).put(peer, step, folder / name)
                except OSError as error:
                    raise CheckpointError(f"{name} could not be copied to {peer.node}: {error}") from error

    def commit(self, step: int) -> Path:
        """Move own files and received copies to their place. One rank of each machine fetches the manifest for it."""
        final = self._fast / f"step-{step}"
        final.mkdir(exist_ok=True)
        own, copies = self._unfinished(step, "own"), self._unfinished(step, "copies")
        if self._leads and self._rank != 0 and self._peers[0].node != self._peers[self._rank].node:
            try:
                cast(Exchange, self._exchange).get(self._peers[0], step, MANIFEST, own / MANIFEST)
            except OSError as error:
                raise CheckpointError(f"the manifest of step {step} did not come from rank 0: {error}") from error
        # The manifest last: without it, the files here are not a checkpoint
        paths = [*copies.glob("[!.]*"), *own.glob("[!.]*")]
        for path in sorted(paths, key=lambda path: path.name == MANIFEST):
            path.replace(final / path.name)
        self._memory[step] = _InMemory()
        return self.path(step)

    @property
    def _leads(self) -> bool:
        """Whether this rank is the first of its machine."""
        nodes = [peer.node for peer in self._peers]
        return not nodes or nodes.index(nodes[self._rank]) == self._rank

    def discard(self, step: int) -> None:
        """Remove the step from this machine, also if this rank has committed it."""
        for kind in ("own", "copies"):
            shutil.rmtree(self._unfinished(step, kind), ignore_errors=True)
        shutil.rmtree(self._fast / f"step-{step}", ignore_errors=True)  # some ranks may have committed it
        self._memory.pop(step, None)

    def clear(self) -> None:
        """Remove all but the newest checkpoint from memory; if its turn has come, begin to write it durably."""
        # All ranks have committed the newest one now: only it stays, and files on their way to the durable storage
        newest = max(self._memory, default=None)
        if newest is not None:
            self._keep(newest)
        for folder in self._fast.glob("step-*"):
            if folder.name != f"step-{newest}":
                shutil.rmtree(folder, ignore_errors=True)
        self._memory = {step: held for step, held in self._memory.items() if step == newest}

    def delete(self, step: int) -> None:
        """Delete the step in memory and durably, for commands; within a run, nothing."""
        if self._exchange is not None:
            return  # during a run, memory has the newest only, and the durable storage deletes by itself
        shutil.rmtree(self._fast / f"step-{step}", ignore_errors=True)
        if step in self._durable.steps():
            self._durable.delete(step)

    # --- the durable storage ---------------------------------------------------------------------------------------

    def _keep(self, step: int) -> None:
        """Write `step` to the durable storage, in the background, if its turn has come."""
        # A step counts once, and only if this process has written it
        if step == self._counted or step != self._own[0]:
            return
        self._counted, self._saves = step, self._saves + 1
        if self._saves % self._every == 0 or self._section.keeps_forever(step):
            # All ranks wait for the one before, so that they agree on which one is next
            self._wait()
            self._stage(step)
            self._writing = threading.Thread(target=self._write, args=(step,), daemon=True, name="durable")
            self._writing.start()

    def _stage(self, step: int) -> None:
        """Links to this rank's files, which stay while newer checkpoints take the place of this one."""
        if step != self._own[0]:  # another process has written it: ranks share its files out
            names = sorted(read_manifest(self.path(step))["files"])
            self._own = step, names[self._rank :: len(self._peers) or 1]
            self.fetch(step, self._own[1])
        shutil.rmtree(self._staged, ignore_errors=True)
        self._staged.mkdir(parents=True)
        for name in [*self._own[1], MANIFEST]:
            if (path := self._fast / f"step-{step}" / name).exists():
                os.link(path, self._staged / name)

    @property
    def _staged(self) -> Path:
        return self._fast / f"durable-{self._rank}"

    def _write(self, step: int) -> None:
        try:
            self._save_durably(step)
        except Exception as error:
            self._fault = str(error)  # reported by the next `begin`: nothing waits for this thread until then

    def _save_durably(self, step: int) -> None:
        manifest = _read(self._staged) if self._rank == 0 else {"files": {}}
        copier = cast(Any, _Copier(self._staged, self._own[1], manifest))
        ranks = Ranks(self._group)
        checkpoints = Checkpoints(self._durable, self._section, self._section.verify, ranks, copier)
        checkpoints.save(step, State({}, {key: value for key, value in manifest.items() if key not in BY_SAVE}))
        self._durable_steps = ranks.on_rank0(lambda: list(self._durable.steps()))
        shutil.rmtree(self._staged, ignore_errors=True)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def close(self) -> None:
        """Write the newest checkpoint durably if it is not, then remove the run's folder in memory."""
        self._wait()
        newest = max(self._memory, default=None)
        if newest is not None and newest not in self._durable_steps:
            self._stage(newest)
            self._save_durably(newest)
        if isinstance(self._durable, SpreadStorage):
            self._durable.close()
        self._memory.clear()
        shutil.rmtree(self._fast, ignore_errors=True)
        if self._exchange is not None:
            self._exchange.close()

    # --- reading ---------------------------------------------------------------------------------------------------

    def size(self, step: int, name: str) -> int:
        """Returns the size by the manifest in memory; a file that no machine has counts as missing."""
        if step in self._memory:
            entry = _read(self.folder(step))["files"].get(name)
            if entry is None or (self._memory[step].holders and name not in self._memory[step].holders):
                raise FileNotFoundError(name)
            return int(entry["size"])
        if isinstance(self._durable, SpreadStorage):
            return self._durable.size(step, name)
        return (self._durable.path(step) / name).stat().st_size

    def fetch(self, step: int, names: Sequence[str]) -> None:
        """Bring missing or damaged files from other machines, or from the durable storage."""
        if step in self._memory:
            self.folder(step).mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(min(4, len(names)) or 1) as pool:
                list(pool.map(lambda name: self._fetch(step, name), names))
        elif isinstance(self._durable, SpreadStorage):
            self._durable.fetch(step, names)

    def _fetch(self, step: int, name: str) -> None:
        if (step, name) in self._checked:
            return
        local = self.folder(step) / name
        with _only_one(local):  # of the ranks of this machine fetches it
            if not local.is_file():
                self._take(step, local, "")
            elif not self._is_intact(step, local):
                self._take(step, local, f"{local} is damaged: its SHA-256 is not the manifest's")
        self._checked.add((step, name))

    def _take(self, step: int, local: Path, reason: str) -> None:
        """Take an intact copy from another machine, or from the durable storage."""
        faults = [reason] if reason else []
        taken = local.with_name(f".{local.name}.{os.getpid()}.taken")
        for source, take in self._sources(step, local.name):
            try:
                take(taken)
            except (OSError, CheckpointError) as error:
                faults.append(f"{source}: {error}")
                continue
            if self._is_intact(step, taken, local.name):
                taken.replace(local)
                if reason:
                    warnings.warn(f"{reason}; taken from {source} instead", stacklevel=2)
                return
            faults.append(f"the copy of {source} is damaged")
        taken.unlink(missing_ok=True)
        raise CheckpointError("; ".join(faults or [f"{local} is missing"]))

    def _sources(self, step: int, name: str) -> Iterator[tuple[str, Callable[[Path], object]]]:
        for rank in self._memory[step].holders.get(name, ()):
            peer = self._peers[rank]
            if peer.node != this_node():
                yield peer.node, lambda target, peer=peer: cast(Exchange, self._exchange).get(peer, step, name, target)  # type: ignore[misc]
        if step in self._durable_steps:
            yield "the durable storage", lambda target: self._from_durable(step, name, target)

    def _from_durable(self, step: int, name: str, target: Path) -> None:
        if isinstance(self._durable, SpreadStorage):
            self._durable.fetch(step, [name])
        shutil.copyfile(self._durable.path(step) / name, target)

    def _is_intact(self, step: int, path: Path, name: str = "") -> bool:
        name = name or path.name
        if name == MANIFEST:
            digest = self._memory[step].digest
            return not digest or _sha256(path) == digest
        entry = read_manifest(self.path(step))["files"].get(name)
        return entry is not None and path.stat().st_size == entry["size"] and _sha256(path) == entry["sha256"]

    # --- common ----------------------------------------------------------------------------------------------------

    def _unfinished(self, step: int, kind: str) -> Path:
        return self._fast / f"step-{step}{UNFINISHED}" / f"{self._rank}-{kind}"

    def _places(self, step: int, name: str) -> list[Path]:
        # Twice: it may be moved from one to the other in between
        final, own = self._fast / f"step-{step}" / name, self._unfinished(step, "own") / name
        return [final, own, final]

    def _warn(self, message: str) -> None:
        if self._rank == 0:
            warnings.warn(message, stacklevel=3)


@frozen
class _Copier:
    """Stands for the writer of tensors: what it writes are the files that are in memory."""

    folder: Path
    own: Sequence[str]
    manifest: Mapping[str, Any]
    """On rank 0."""

    def write(self, folder: Path, tensors: Any, staged: Any, ranks: Ranks) -> dict[str, Any]:
        def copy() -> dict[str, Any]:
            return {name: write_file(folder / name, _blocks(self.folder / name)) for name in self.own}

        written = ranks.on_all(copy)
        files = {name: entry for of_rank in written for name, entry in of_rank.items()}
        wrong = [name for name, entry in self.manifest["files"].items() if files.get(name) != entry]
        if ranks.on_rank0(lambda: wrong):
            raise CheckpointError(f"{', '.join(wrong) or 'a file of rank 0'}: damaged in memory")
        return files


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
        report_progress("verifying")
    return digest.hexdigest()


def _read(folder: Path) -> dict[str, Any]:
    """The manifest that is in a folder, and nowhere else: `read_manifest` would fetch it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        _ = [(entry["size"], entry["sha256"]) for entry in manifest["files"].values()], manifest["time"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: {type(error).__name__}: {error}") from error
    return manifest


@contextmanager
def _only_one(local: Path) -> Iterator[None]:
    with open(local.with_name(f".{local.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
