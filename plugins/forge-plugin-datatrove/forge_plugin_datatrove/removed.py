"""What became of a document: the records of all stages, by id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from forge_core.contracts.errors import JobError
from forge_plugin_datatrove.accounting import CHANGED, ORIGIN
from forge_plugin_datatrove.table import DOCUMENTS, REMOVED, STAGES, SUMMARY, Table


def records_of(table: Table, name: str = REMOVED) -> Iterator[Mapping[str, Any]]:
    """Yields the records of a folder of all stages that are finished, in the order of stages and files."""
    for stage in STAGES:
        folder = table.folder(stage)
        if (folder / SUMMARY).is_file():
            # Read each time: records are searched seldom, and an index would be as large
            for path in sorted((folder / name).glob("*.jsonl")):
                with path.open("rb") as file:
                    yield from map(orjson.loads, file)


def fate_of(table: Table, id_: str) -> dict[str, Any]:
    """Returns what became of a document: why it was removed, or the file that has it, and what was cut out of it.

    Raises:
        JobError: no finished stage has met such an id.
    """
    removed, changed = (
        [record for record in records_of(table, name) if record["id"] == id_] for name in (REMOVED, CHANGED)
    )
    cut = {"changed": changed} if changed else {}
    if removed:
        return {"id": id_, "removed": removed, **cut}
    kept = _kept(table, id_)
    if kept is None:
        done = [stage for stage in STAGES if (table.folder(stage) / SUMMARY).is_file()]
        raise JobError(
            f"--why {id_}: no document of this id in {table.output} ({', '.join(done) or 'no stage is finished'})"
        )
    return {"id": id_, "kept": kept, **cut}


def _kept(table: Table, id_: str) -> dict[str, Any] | None:
    """Returns file and origin of a document in what the last finished stage has kept."""
    import pyarrow

    done = [stage for stage in STAGES if (table.folder(stage) / SUMMARY).is_file()]
    # As a line has it: a path of Windows has backslashes, which JSON doubles
    wanted = orjson.dumps(id_)[1:-1]
    for path in sorted((table.folder(done[-1]) / DOCUMENTS).iterdir()) if done else ():
        compression: Any = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
        with pyarrow.input_stream(str(path), compression=compression) as stream:
            for number, line in enumerate(_lines(stream), 1):
                # Parsed only where the id may be in it
                if wanted in line and (record := orjson.loads(line))["id"] == id_:
                    return {"file": str(Path(path)), "line": number, "origin": record[ORIGIN]}
    return None


def _lines(stream: Any) -> Iterator[bytes]:
    rest = b""
    while block := stream.read(1 << 20):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
