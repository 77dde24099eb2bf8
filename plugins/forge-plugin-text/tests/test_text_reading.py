"""From files to documents: formats, compression, encodings and damage."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from forge_core.contracts.errors import JobError
from forge_plugin_text import Text, TextFile
from forge_plugin_text.listing import find_files
from forge_plugin_text.reading import Reading
from forge_testing.refusals import refuses

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def documents(component: Text) -> list[tuple[str, str]]:
    return [(document.name, document.text) for document, _ in component.corpus().documents()]


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("format_", [".txt", ".py", ".md"])
def test_a_file_is_one_document_as_it_is(here: Path, format_: str, compression: str) -> None:
    text = "first line\r\n\n  zweite Zeile: ä€😀\n"
    Path(f"a{format_}{compression}").write_bytes(COMPRESS[compression](text.encode()))
    assert documents(Text(path=".")) == [(f"a{format_}{compression}", text)]


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_line_of_jsonl_is_one_document_named_by_its_number(here: Path, compression: str) -> None:
    lines = [{"body": "one\u2028still one"}, {"body": "twö", "id": 3}]
    content = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    Path(f"a.jsonl{compression}").write_bytes(COMPRESS[compression](content.encode()))
    found = documents(Text(path=".", field="body"))
    assert found == [(f"a.jsonl{compression}:1", "one\u2028still one"), (f"a.jsonl{compression}:3", "twö")]


def test_documents_come_by_name_of_file_then_by_line(here: Path) -> None:
    Path("b.txt").write_text("last")
    Path("a.jsonl").write_text("\n".join(json.dumps({"text": f"line {n}"}) for n in range(1, 12)))
    found = [name for name, _ in documents(Text(path=("b.txt", "a.jsonl")))]
    assert found == [f"a.jsonl:{n}" for n in range(1, 12)] + ["b.txt"]


def test_a_byte_order_mark_is_dropped(here: Path) -> None:
    Path("a.txt").write_text("text", "utf-8-sig")
    Path("b.jsonl").write_text('{"text": "line"}', "utf-8-sig")
    assert documents(Text(path=".")) == [("a.txt", "text"), ("b.jsonl:1", "line")]


def test_several_zstd_frames_are_read_to_the_last(here: Path) -> None:
    compress = zstandard.ZstdCompressor().compress
    Path("a.txt.zst").write_bytes(compress(b"one ") + compress(b"") + compress(b"two " * 300_000) + compress(b"three"))
    [(_, text)] = documents(Text(path="a.txt.zst"))
    assert text == "one " + "two " * 300_000 + "three"


@pytest.mark.parametrize("compression", [".gz", ".zst"])
@pytest.mark.parametrize("keep", [0.2, 0.9])
def test_compressed_data_that_is_cut_short_is_an_error(here: Path, compression: str, keep: float) -> None:
    data = COMPRESS[compression](json.dumps(list(range(5000))).encode())
    Path(f"a.txt{compression}").write_bytes(data[: int(len(data) * keep)])
    with refuses("", f"a.txt{compression}", "damaged"):
        documents(Text(path="."))


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_a_file_that_is_not_compressed_as_its_name_says_is_an_error(here: Path, compression: str) -> None:
    Path(f"a.txt{compression}").write_bytes(b"plain text all along")
    with pytest.raises(JobError, match=f"damaged {compression} data"):
        documents(Text(path="."))


@pytest.mark.parametrize("name", ["gone.txt", "gone.jsonl", "gone.txt.gz", "gone.txt.zst"])
def test_a_file_that_is_gone_after_it_was_listed_is_an_error(here: Path, name: str) -> None:
    file = TextFile(f"data/{name}", f"{here}/data/{name}")
    with refuses("", file.path, "No such file"):
        next(Reading().documents(file))
    with refuses("", file.path, "No such file"):
        file.stat()


def test_bytes_that_are_not_utf8_are_an_error_with_file_and_offset(here: Path) -> None:
    Path("a.txt").write_bytes("ä good start".encode() + b"\xff and more")
    with refuses("", f"{here}/a.txt", "byte 13", "0xff", "UTF-8", 'errors = "replace"'):
        documents(Text(path="a.txt"))


def test_the_offset_in_jsonl_counts_from_the_start_of_the_file(here: Path) -> None:
    lines = b'{"text": "fine"}\n{"text": "\xe4"}\n'
    Path("a.jsonl").write_bytes(lines)
    with refuses("", "a.jsonl:2", f"byte {lines.index(0xE4)}", "0xe4", "UTF-8"):
        documents(Text(path="a.jsonl"))


def test_bytes_that_are_not_utf8_can_be_replaced(here: Path) -> None:
    Path("a.txt").write_bytes(b"caf\xe9!")
    Path("b.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "half \\ud83d pair"}')
    found = [text for _, text in documents(Text(path=".", errors="replace"))]
    assert found == ["caf\ufffd!", "caf\ufffd", "half \ufffd pair"]


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("{text: 1}", ["not JSON", "'{text: 1}'"]),
        ('["text"]', ["'[\"text\"]'", "object"]),
        ('{"body": "x", "id": 1}', ["'text'", "'body', 'id'", "`field`"]),
        ("{}", ["'text'", "nothing", "`field`"]),
        ('{"text": [1, 2]}', ["'text'", "'[1, 2]'", "string"]),
        ('{"text": "a\\ud83d"}', ["character 1", "'text'", "surrogate", "UTF-8", 'errors = "replace"']),
    ],
)
def test_a_line_of_jsonl_without_a_text_is_an_error_with_its_number(here: Path, line: str, facts: list[str]) -> None:
    Path("a.jsonl").write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with refuses("", f"{here}/a.jsonl:3", *facts):
        documents(Text(path="a.jsonl"))


def test_a_long_wrong_line_is_quoted_in_part(here: Path) -> None:
    Path("a.jsonl").write_text("x" * 5000)
    with pytest.raises(JobError) as caught:
        documents(Text(path="a.jsonl"))
    assert "'" + "x" * 60 + "…'" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_archive_has_a_document_for_each_name(here: Path) -> None:
    with tarfile.open("a.tar", "w") as archive:
        for name, content in (("x/a.txt", "one"), ("x/b.json", '{"text": "two"}'), ("x/a.json", '{"text": "of a"}')):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content.encode()))
    [file] = find_files(["a.tar"])
    found = [(document.name, document.text) for document in Reading().documents(file)]
    assert found == [("a.tar:1", "one"), ("a.tar:2", "two")]
    with tarfile.open("b.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("a.jpg"))
    with pytest.raises(JobError, match=r"b\.tar:1 \(a\): has neither \.txt nor \.json"):
        list(Reading().documents(find_files(["b.tar"])[0]))
