"""What `data prepare` writes: every document of the input, in order, whatever its format and whoever encodes it."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from forge_core.cli import main
from forge_kit.data.token_file import TokenFile
from forge_plugin_memmap.prepare import documents, inputs, parquet_files, text_files
from forge_plugin_memmap.prepare.command import parse, read_settings
from forge_plugin_memmap.prepare.folder import owned
from forge_plugin_memmap.tokenizer_folder import NO_RUN
from forge_testing.refusals import lacks, refuses

Prepare = Callable[..., str]
TOKENIZER = "--tokenizer=./letters.py:Letters"
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def write(path: str, data: bytes) -> None:
    """A file, compressed as its name says."""
    Path(path).write_bytes(COMPRESS.get(Path(path).suffix, bytes)(data))


def write_lines(path: str, texts: list[str], **more: Any) -> None:
    write(path, "".join(json.dumps({"text": text, **more}) + "\n" for text in texts).encode())


def write_parquet(path: str, texts: list[Any], type_: Any = None, **options: Any) -> None:
    parquet.write_table(pa.table({"number": range(len(texts)), "text": pa.array(texts, type_)}), path, **options)


def texts_in(folder: str, split: str = "train") -> list[str]:
    """The documents of a split, decoded."""
    found = []
    for path in sorted(Path(folder).glob(f"{split}-*.bin")):
        file = TokenFile(path.with_suffix(""))
        starts = [0, *file.ends().tolist()]
        for start, end in pairwise(starts):
            *ids, last = file.tokens(start, end).tolist()
            assert last == 0
            found.append("".join(chr(96 + id_) if id_ < 27 else "?" for id_ in ids))
    return found


def as_letters(text: str) -> str:
    """What `Letters` can tell of a text."""
    return "".join(letter if "a" <= letter <= "z" else "?" for letter in text)


def manifest(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "manifest.json").read_text())


def content(folder: str) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few documents are several chunks, and a long one several pieces."""
    monkeypatch.setattr(inputs, "CHUNK", 20)
    for module in (text_files, parquet_files):
        monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 8)


# --- formats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_line_of_json_lines_is_a_document(prepare: Prepare, small_chunks: None, suffix: str) -> None:
    write_lines(f"a{suffix}", WORDS, id=3)
    prepare(f"a{suffix}", "--out=data")
    assert texts_in("data") == WORDS


@pytest.mark.parametrize("suffix", [".txt", ".md.gz", ".py.zst"])
def test_a_text_file_is_a_document(prepare: Prepare, small_chunks: None, suffix: str) -> None:
    text = "first line\r\nsecond line äß€😀\n" * 3
    write(f"a{suffix}", text.encode())
    prepare(f"a{suffix}", "--out=data")
    assert texts_in("data") == [as_letters(text)]
    assert manifest("data")["splits"]["train"]["bytes"] == len(text.encode())


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_row_of_parquet_is_a_document(prepare: Prepare, small_chunks: None, type_: Any) -> None:
    write_parquet("a.parquet", WORDS, type_, row_group_size=4)
    prepare("a.parquet", "--out=data")
    assert texts_in("data") == WORDS


def test_the_order_is_that_of_the_inputs_and_in_a_folder_that_of_names(prepare: Prepare) -> None:
    Path("folder/deep").mkdir(parents=True)
    for name in ("folder/b.txt", "folder/a.md", "folder/deep/c.py", "z.txt"):
        Path(name).write_text(Path(name).stem)
    Path("folder/.hidden.txt").write_text("hidden")
    Path("folder/notes.rst").write_text("of no known format")
    write_lines("lines.jsonl", ["x", "y"])
    prepare("z.txt", "folder", "*.jsonl", "folder/a.md", "--out=data")
    assert texts_in("data") == ["z", "a", "b", "c", "x", "y"]


def test_another_field_can_hold_the_text(prepare: Prepare) -> None:
    Path("a.jsonl").write_text('{"body": "one", "text": "not"}\n')
    parquet.write_table(pa.table({"body": ["two"]}), "b.parquet")
    prepare("a.jsonl", "b.parquet", "--out=data", "--field=body")
    assert texts_in("data") == ["one", "two"]


def test_a_byte_order_mark_is_passed_over(prepare: Prepare) -> None:
    Path("a.txt").write_text("text", "utf-8-sig")
    Path("b.jsonl").write_text('{"text": "line"}', "utf-8-sig")
    prepare("a.txt", "b.jsonl", "--out=data")
    assert texts_in("data") == ["text", "line"]


@given(found=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), min_size=1, max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=12)
def test_every_text_survives_every_format(tmp_path_factory: Any, small_chunks: None, found: list[str]) -> None:
    folder = tmp_path_factory.mktemp("formats")
    write_lines(str(folder / "a.jsonl"), found)
    write_parquet(str(folder / "b.parquet"), found, row_group_size=3)
    for number, text in enumerate(found):
        (folder / f"c{number}.txt").write_bytes(text.encode())
    main(["data", "prepare", str(folder), "--out", str(folder / "data"), TOKENIZER, "--workers=1"])
    files = filter(None, (text.removeprefix("\ufeff") for text in found))
    assert texts_in(str(folder / "data")) == [as_letters(text) for text in [*found, *found, *files]]


def test_the_tokens_are_those_of_the_dataset_text(prepare: Prepare) -> None:
    from types import SimpleNamespace

    from forge_core.contracts.components import DatasetComponent
    from forge_core.plugins.catalog import Catalog

    Path("corpus").mkdir()
    write_lines("corpus/a.jsonl", WORDS)
    Path("corpus/b.txt").write_text("text äöü\n" * 20)
    prepare("corpus", "--out=data", "--tokenizer=bpe", "--tokenizer.vocab_size=300", "--held-out-every=3")
    catalog = Catalog.installed()
    tokenizer = catalog.load("tokenizer", "prepared")(path="data").build(None, None)
    text: type[DatasetComponent] = catalog.load("dataset", "text")
    live = text(path="corpus", held_out_every=3).build(SimpleNamespace(tokenizer=tokenizer, mesh=None))
    for split, same in (("train", live), ("held_out", live.held_out)):
        file = TokenFile(Path(f"data/{split}-00000"))
        assert file.tokens(0, len(file)).tolist() == same.tokens(0, len(same)).tolist()
        assert file.header == same.header


# --- workers -----------------------------------------------------------------------------------------------------


def test_the_folder_is_the_same_to_the_byte_whatever_the_number_of_workers(
    prepare: Prepare, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "CHUNK", 200)
    write_lines("a.jsonl", [word * number for number, word in enumerate(WORDS * 20)])
    Path("b.txt").write_text("a long text\n" * 40)
    write_parquet("c.parquet", WORDS, row_group_size=3)
    common = ("a.jsonl", "b.txt", "c.parquet", "--held-out-every=7", "--shard-tokens=300", "--errors=skip")
    for workers in (1, 3):
        prepare(*common, f"--out=data{workers}", f"--workers={workers}")
    assert len(list(Path("data1").glob("train-*.bin"))) > 5
    assert content("data1") == content("data3")


# --- shards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 5, 9, 1000])
def test_a_shard_ends_with_the_document_that_fills_it(prepare: Prepare, small_chunks: None, size: int) -> None:
    write_lines("a.jsonl", WORDS)
    prepare("a.jsonl", "--out=data", f"--shard-tokens={size}")
    assert texts_in("data") == WORDS
    files = [TokenFile(path.with_suffix("")) for path in sorted(Path("data").glob("*.bin"))]
    for file in files[:-1]:
        ends = [0, *file.ends().tolist()]
        assert ends[-1] >= size > ends[-2]


def test_a_document_longer_than_a_shard_is_not_divided(prepare: Prepare, small_chunks: None) -> None:
    Path("a.txt").write_text("abc\n" * 50)
    Path("b.txt").write_text("abc")
    prepare("a.txt", "b.txt", "--out=data", "--shard-tokens=10")
    assert [len(text) for text in texts_in("data")] == [200, 3]
    assert len(list(Path("data").glob("*.bin"))) == 2


def test_the_output_may_lie_among_the_inputs(prepare: Prepare) -> None:
    Path("corpus").mkdir()
    write_lines("corpus/a.jsonl", WORDS)
    prepare("corpus", "--out=corpus/data")
    Path("corpus/data/notes.txt").write_text("no input")
    manifest = Path("corpus/data/manifest.json").read_bytes()
    prepare("corpus", "--out=corpus/data")
    assert Path("corpus/data/manifest.json").read_bytes() == manifest


@pytest.mark.parametrize("every", [2, 3, 10, 50])
def test_every_nth_document_is_held_out_starting_with_the_first(
    prepare: Prepare, small_chunks: None, every: int
) -> None:
    write_lines("a.jsonl", ["", *WORDS])
    prepare("a.jsonl", "--out=data", f"--held-out-every={every}", "--shard-tokens=20")
    assert texts_in("data", "held_out") == WORDS[::every]
    assert texts_in("data") == [word for number, word in enumerate(WORDS) if number % every]


def test_a_held_out_document_in_pieces_is_held_out_as_a_whole(prepare: Prepare, small_chunks: None) -> None:
    for name in "abc":
        Path(f"{name}.txt").write_text(f"{name} long text\n" * 10)
    prepare("*.txt", "--out=data", "--held-out-every=2")
    assert [text[0] for text in texts_in("data", "held_out")] == ["a", "c"]
    assert [text[0] for text in texts_in("data")] == ["b"]


# --- what is told ------------------------------------------------------------------------------------------------


def test_the_manifest_has_sizes_digests_counts_and_arguments(prepare: Prepare) -> None:
    write_lines("a.jsonl", WORDS)
    prepare("a.jsonl", "--out=data", "--held-out-every=5", "--shard-tokens=1k")
    found = manifest("data")
    assert found["splits"] == {
        "train": {"documents": 8, "tokens": 41, "bytes": 33, "files": ["train-00000.bin"]},
        "held_out": {"documents": 2, "tokens": 8, "bytes": 6, "files": ["held_out-00000.bin"]},
    }
    assert set(found["files"]) == {
        f"{s}-00000{x}" for s in ("train", "held_out") for x in (".bin", ".ends", ".origins")
    }
    for name, described in found["files"].items():
        data = Path("data", name).read_bytes()
        facts = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if name.endswith(".origins"):
            assert described == facts
            continue
        assert described == facts | {"sums_of": 1 << 16}
        assert Path("data", f"{name}.crc32").read_bytes() == zlib.crc32(data).to_bytes(4, "little")
    assert found["tokenizer"] == {
        "fingerprint": hashlib.sha256(b"letters").hexdigest(),
        "vocab_size": 28,
        "end_of_text": 0,
    }
    assert found["arguments"]["shard_tokens"] == 1000
    assert found["arguments"]["inputs"]["files"] == 1
    assert found["arguments"]["inputs"]["bytes"] == Path("a.jsonl").stat().st_size
    assert json.loads(Path("data/inputs.json").read_text())[0]["name"] == "a.jsonl"
    assert found["dropped"] == {}


def test_the_summary_tells_what_was_written_and_how_to_use_it(prepare: Prepare) -> None:
    write_lines("a.jsonl", WORDS)
    out = prepare("a.jsonl", "--out=data", "--held-out-every=5")
    assert "\nsplit     documents  tokens  bytes of text  shards\n" in out
    assert "\ntrain     8          41      33             1\nheld_out  2          8       6              1\n" in out
    assert "tokens/s" in out
    assert not lacks(out, "0 of 10")
    in_a_job = (
        '[data.tokenizer]\ntype = "prepared"\npath = "data"\n\n[[data.sources]]\ntype = "memmap"\npath = "data"\n'
    )
    assert out.endswith(f"\n\n{in_a_job}")


def test_json_is_all_of_standard_output(prepare: Prepare, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("a.jsonl", WORDS)
    main(["data", "prepare", "a.jsonl", "--out=data", TOKENIZER, "--workers=0", "--held-out-every=5", "--json"])
    out, err = capsys.readouterr()
    found = manifest("data")
    assert json.loads(out) == {"out": "data", **{key: found[key] for key in ("splits", "kept", "dropped", "tokenizer")}}
    assert "making the tokenizer" in err


def test_a_terminal_has_a_bar(here: Path) -> None:
    write_lines("a.jsonl", WORDS)
    command = [
        sys.executable,
        "-m",
        "forge_core",
        "data",
        "prepare",
        "a.jsonl",
        "--out=data",
        TOKENIZER,
        "--workers=1",
    ]
    master, slave = os.openpty()
    done = subprocess.run(command, stdout=slave, stderr=slave, check=False)
    os.close(slave)
    shown = os.read(master, 1 << 16).decode()
    assert done.returncode == 0, shown
    assert "100%" in shown
    assert "10 documents  49 tokens" in shown


# --- tokenizers --------------------------------------------------------------------------------------------------


def test_the_tokenizer_of_a_job_can_be_taken(forge_run: Callable[..., Any]) -> None:
    write_lines("a.jsonl", WORDS * 10)
    Path("job.toml").write_text('[data.tokenizer]\ntype = "bpe"\nvocab_size = 270\n[model]\ntype = "no matter"\n')
    code, _, err = forge_run("data", "prepare", "a.jsonl", "--out=data", "--job=job.toml", "--workers=2")
    assert code == 0, err
    assert manifest("data")["arguments"]["tokenizer"]["vocab_size"] == 270
    assert manifest("data")["tokenizer"]["vocab_size"] == 270


def test_a_tokenizer_json_and_the_folder_of_other_data_can_be_taken(prepare: Prepare) -> None:
    write_lines("a.jsonl", WORDS * 10)
    prepare("a.jsonl", "--out=one", "--tokenizer=bpe", "--tokenizer.vocab_size=270")
    prepare("a.jsonl", "--out=two", "--tokenizer=one/tokenizer/files/tokenizer.json")
    prepare("a.jsonl", "--out=three", "--tokenizer=prepared", "--tokenizer.path=one")
    prints = {manifest(folder)["tokenizer"]["fingerprint"] for folder in ("one", "two", "three")}
    assert len(prints) == 1
    assert content("three")["tokenizer/component.json"] == content("one")["tokenizer/component.json"]


def test_a_trained_tokenizer_does_not_see_what_is_held_out(prepare: Prepare) -> None:
    write_lines("a.jsonl", ["zzzzzzzz" * 20, "abababab" * 20] * 3)
    prepare("a.jsonl", "--out=data", "--held-out-every=2", "--tokenizer=bpe", "--tokenizer.vocab_size=300")
    vocabulary = json.loads(Path("data/tokenizer/files/tokenizer.json").read_text())["model"]["vocab"]
    assert "abab" in vocabulary
    assert "zz" not in vocabulary


# --- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["missing.jsonl", TOKENIZER], ["'missing.jsonl'", "looked from"]),
        (["letters.py", "a.csv", TOKENIZER], ["a.csv", ".jsonl", ".txt", ".md"]),
        (["a.parquet", TOKENIZER, "--field=body"], ["a.parquet", "'body'", "number, text"]),
        (["a.parquet", TOKENIZER, "--field=number"], ["a.parquet", "'number'", "int64"]),
        (["bad.parquet", TOKENIZER], ["bad.parquet", "Parquet"]),
        (["letters.py", "--tokenizer=bbpe"], ["'bbpe'", "'bpe'"]),
        (["letters.py", "--tokenizer=bpe", "--tokenizer.vocab=9"], ["tokenizer.vocab", "'vocab_size'"]),
        (
            ["letters.py", "--tokenizer=bpe", "--tokenizer.vocab_size=many"],
            ["--tokenizer.vocab_size=many", "tokenizer.vocab_size:", "int", "'many'"],
        ),
        (
            ["letters.py", "--tokenizer=bpe", "--tokenizer.vocab_size=257", "--tokenizer.special_tokens=['a']"],
            ["no room"],
        ),
        (["letters.py", "--tokenizer=nowhere.json"], ["tokenizer.path", "'nowhere.json'"]),
        (["letters.py", "--job=job.toml"], ["data.tokenizer", "missing"]),
        (["letters.py"], ["--tokenizer --job", "required"]),
        (["letters.py", TOKENIZER, "--job=job.toml"], ["--job", "--tokenizer", "not allowed"]),
        (["letters.py", "--job=job.toml", "--tokenizer.path=a"], ["--tokenizer.path", "--job"]),
        (["letters.py", TOKENIZER, "--shard-tokens=many"], ["--shard-tokens", "'many'", "100k"]),
        (["letters.py", TOKENIZER, "--held-out-every=1"], ["--held-out-every", 0, 2, 1]),
        (["letters.py", TOKENIZER, "--workers=-1"], ["--workers", 0, -1]),
    ],
)
def test_a_wrong_argument_is_told_and_nothing_is_written(
    forge_run: Callable[..., Any], arguments: list[str], facts: list[object]
) -> None:
    Path("a.csv").touch()
    Path("bad.parquet").write_text("not Parquet at all")
    Path("job.toml").write_text("[train]\nsteps = 3\n")
    write_parquet("a.parquet", WORDS)
    code, _, err = forge_run("data", "prepare", *arguments, "--out=data")
    assert code == 2
    assert not lacks(err, *facts)
    assert not Path("data").exists()


def test_an_output_folder_that_cannot_be_made_is_refused(here: Path) -> None:
    """As one below a file, or of a file system that can only be read."""
    with refuses("", "--out letters.py/data", "Not a directory"), owned(Path("letters.py/data")):
        pass


@pytest.mark.parametrize(
    ("line", "wrong", "facts"),
    [
        # Otherwise the folder would hold ids of one tokenizer, and another
        ('hashlib.sha256(b"letters").hexdigest()', "str(id(self))", ("data/tokenizer", "wrong.py:Letters")),
        ("return Letter", "context.job\n        return Letter", ("'job'", "tokenizer")),
    ],
    ids=["changes when it is saved", "depends on a run"],
)
def test_a_tokenizer_that_cannot_prepare_data_is_refused(
    forge_run: Callable[..., Any], here: Path, line: str, wrong: str, facts: tuple[str, ...]
) -> None:
    (here / "wrong.py").write_text((here / "letters.py").read_text().replace(line, wrong))
    argument = "--tokenizer=./wrong.py:Letters"
    code, _, err = forge_run("data", "prepare", "letters.py", "--out=data", argument, "--workers=1")
    assert code == 1
    assert not lacks(err, *facts)


def test_what_python_itself_requests_of_a_missing_run_does_not_fail() -> None:
    assert not hasattr(NO_RUN, "__deepcopy__")


def test_a_core_is_a_worker_by_default(here: Path) -> None:
    settings = read_settings(*parse(["letters.py", "--out=data", TOKENIZER]))
    assert settings.workers == len(os.sched_getaffinity(0))
    assert settings.shard_tokens == 10**8
