"""What gives no document: stops the command, or is counted with its reason and places."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from forge_core.cli import main
from forge_plugin_memmap.prepare.text_files import opened
from forge_testing.refusals import lacks, refuses

Prepare = Callable[..., str]
TOKENIZER = "--tokenizer=./letters.py:Letters"

LINES: dict[bytes, tuple[str, str]] = {
    b'{"text": "cut': ("not JSON", 'Unterminated string starting at: line 1 column 10 (char 9): {"text": "cut'),
    b"NaN": ("not an object", "NaN"),
    b'["text"]': ("not an object", '["text"]'),
    b'{"body": "x", "id": 3}': ("no field", "its keys: body, id"),
    b'{"text": 17}': ("not a string", "17"),
    b'{"text": null}': ("not a string", "null"),
    b'{"text": "\xff"}': ("not UTF-8", "byte 10 of the line, 0xff: invalid start byte"),
    b'{"text": "a\\ud800b"}': ("not UTF-8", "character 1 is half a surrogate pair"),
    b'{"text": ""}': ("empty", ""),
    b"  \t": ("empty", "blank line"),
    b"[" * 100_000: ("not JSON", "maximum recursion depth exceeded"),
}


def dropped(folder: str = "data") -> dict[str, Any]:
    return json.loads(Path(folder, "manifest.json").read_text())["dropped"]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:20].decode("latin-1"))
def test_a_line_without_a_document_is_counted_with_its_place(prepare: Prepare, line: bytes) -> None:
    reason, detail = LINES[line]
    Path("a.jsonl").write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')
    prepare("a.jsonl", "--out=data", "--errors=skip")
    assert set(dropped()) == {reason}
    assert dropped()[reason]["count"] == 1
    [example] = dropped()[reason]["examples"]
    assert example.startswith(f"a.jsonl:2 ({detail}" if detail else "a.jsonl:2")


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:20].decode("latin-1"))
def test_unless_it_is_empty_it_stops_a_strict_command(forge_run: Callable[..., Any], line: bytes) -> None:
    reason, detail = LINES[line]
    Path("a.jsonl").write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')
    code, _, err = forge_run("data", "prepare", "a.jsonl", "--out=data", TOKENIZER, "--workers=1")
    assert (code == 0) == (reason == "empty")
    if code:
        assert err.startswith(f"a.jsonl:2: {reason} ({detail}")
        assert not lacks(err, "--errors skip")


def test_a_text_file_that_is_not_utf8_gives_nothing_however_long_it_is(prepare: Prepare) -> None:
    Path("a.txt").write_bytes(b"a" * 3_000_000 + b"\xe4" + b"a" * 3_000_000)
    Path("b.txt").write_bytes("ä".encode()[:1])
    Path("c.txt").write_text("")
    Path("d.txt").write_text("good")
    prepare("*.txt", "--out=data", "--errors=skip")
    assert dropped() == {
        "empty": {"count": 1, "examples": ["c.txt"]},
        "not UTF-8": {
            "count": 2,
            "examples": ["a.txt (byte 3000000: invalid continuation byte)", "b.txt (byte 0: unexpected end of data)"],
        },
    }


def test_rows_of_parquet_are_dropped_like_lines(prepare: Prepare) -> None:
    broken = pa.array([b"one", None, b"", b"\xff", b"two"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": broken}), "a.parquet")
    prepare("a.parquet", "--out=data", "--errors=skip")
    assert dropped() == {
        "empty": {"count": 1, "examples": ["a.parquet:3"]},
        "not UTF-8": {"count": 1, "examples": ["a.parquet:4 (byte 0 of the text, 0xff: invalid start byte)"]},
        "not a string": {"count": 1, "examples": ["a.parquet:2 (null)"]},
    }


def test_the_summary_tells_reasons_counts_and_the_first_places(prepare: Prepare) -> None:
    Path("a.jsonl").write_text('{"text": "one"}\n' + "{}\n" * 5 + "\n")
    out = prepare("a.jsonl", "--out=data", "--errors=skip")
    rows = [line for line in out.splitlines() if "a.jsonl:" in line]
    assert not lacks(out, "6 of 7")
    assert not lacks(rows[0], "empty: 1", "a.jsonl:7")
    assert not lacks(rows[1], "no field: 5", "a.jsonl:2", "a.jsonl:3", "a.jsonl:4", "…")
    assert "a.jsonl:5" not in rows[1]


def test_the_last_line_needs_no_line_break(prepare: Prepare) -> None:
    Path("a.jsonl").write_text('{"text": "one"}\n{"text": "two"}')
    assert not lacks(prepare("a.jsonl", "--out=data"), "0 of 2")


@given(lines=st.lists(st.sampled_from([b'{"text": "one"}', *LINES]), min_size=1, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15)
def test_every_line_is_a_document_or_is_counted(tmp_path_factory: Any, here: Path, lines: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("lines")
    (folder / "a.jsonl").write_bytes(b'{"text": "first"}\n' + b"\n".join(lines) + b"\n")
    output = ["--out", str(folder / "data")]
    main(["data", "prepare", str(folder / "a.jsonl"), *output, TOKENIZER, "--errors=skip", "--workers=1"])
    manifest = json.loads((folder / "data/manifest.json").read_text())
    kept = manifest["splits"]["train"]["documents"]
    assert kept == 1 + lines.count(b'{"text": "one"}')
    assert kept + sum(entry["count"] for entry in manifest["dropped"].values()) == 1 + len(lines)


def test_no_document_at_all_is_an_error(forge_run: Callable[..., Any]) -> None:
    Path("a.jsonl").write_text("{}\n\n")
    code, _, err = forge_run("data", "prepare", "a.jsonl", "--out=data", TOKENIZER, "--errors=skip", "--workers=1")
    assert code == 2
    assert not lacks(err, "1 files", "1 no field", "1 empty")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("errors", ["strict", "skip"])
def test_damaged_compression_stops_the_command(forge_run: Callable[..., Any], suffix: str, errors: str) -> None:
    data = gzip.compress(b'{"text": "one"}\n' * 1000)
    Path(f"a.jsonl{suffix}").write_bytes(data[:-5])
    code, _, err = forge_run(
        "data", "prepare", f"a.jsonl{suffix}", "--out=data", TOKENIZER, f"--errors={errors}", "--workers=1"
    )
    assert code == 2
    assert err.startswith(f"a.jsonl{suffix}: damaged {'gzip' if suffix == '.gz' else 'zstd'} data (")


@pytest.mark.parametrize("errors", ["strict", "skip"])
def test_a_damaged_row_group_stops_the_command(forge_run: Callable[..., Any], errors: str) -> None:
    """The footer, which the check of the arguments reads, is whole."""
    parquet.write_table(pa.table({"text": ["one", "two"]}), "a.parquet")
    data = Path("a.parquet").read_bytes()
    Path("a.parquet").write_bytes(data[:4] + bytes(40) + data[44:])
    arguments = ("--out=data", TOKENIZER, f"--errors={errors}", "--workers=1")
    code, _, err = forge_run("data", "prepare", "a.parquet", *arguments)
    assert code == 2
    assert err.startswith("a.parquet: cannot be read as Parquet (")


@pytest.mark.parametrize("name", ["gone.txt", "gone.jsonl.gz"])
def test_a_file_that_is_gone_after_it_was_listed_is_refused(name: str) -> None:
    with refuses("", f"{name}: cannot be read", "No such file"), opened(name):
        pass


def test_an_id_that_no_text_has_is_an_error_of_the_tokenizer(forge_run: Callable[..., Any], here: Path) -> None:
    (here / "bad.py").write_text((here / "letters.py").read_text().replace("ord(letter) - 96", "ord(letter) - 97"))
    Path("a.jsonl").write_text('{"text": "bcd"}\n{"text": "cab"}\n')
    code, _, err = forge_run("data", "prepare", "a.jsonl", "--out=data", "--tokenizer=./bad.py:Letters", "--workers=1")
    assert code == 1
    assert not lacks(err, "a.jsonl:2", "id 0", "[0, 28)")
