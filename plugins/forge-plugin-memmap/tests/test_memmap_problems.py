"""What is wrong with the data is told before anything is built, and nothing is guessed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_core.contracts.errors import DataError, Problem
from forge_core.plugins.catalog import Catalog
from forge_kit.data.token_file import TokenFileWriter
from forge_plugin_memmap import PreparedTokenizer
from forge_plugin_memmap.formats import Raw
from forge_plugin_memmap.formats.reading import read_shard
from forge_plugin_memmap.shards import check_visible
from forge_testing.processes import exit_code_of_fork
from forge_testing.refusals import ExpectedProblem, at, check_problems, lacks, naming, refuses, refuses_all

Find = Callable[..., list[Problem]]


def write_token_file(stem: str, vocab_size: int = 100, end_of_text: int = 9) -> None:
    with TokenFileWriter(Path(stem), vocab_size, end_of_text) as writer:
        writer.add("document", [1, 2])


@pytest.fixture
def files(here: Path) -> None:
    """A file of every kind, good and bad."""
    np.save("good.npy", np.arange(8, dtype=np.uint16))
    write_token_file("good")
    np.arange(6, dtype="<u2").tofile("raw.bin")
    Path("empty.bin").touch()
    Path("odd.bin").write_bytes(b"12345")
    np.save("float.npy", np.zeros(4))
    np.save("square.npy", np.zeros((2, 2), int))
    np.save("none.npy", np.zeros(0, int))
    Path("dolma").mkdir()
    np.arange(6, dtype="<u2").tofile("dolma/part-0-00000.npy")
    Path("text.npy").write_text("not an array of numpy, but a text")
    Path("cut.npy").write_bytes(Path("good.npy").read_bytes()[:-4])
    Path("cut.bin").write_bytes(Path("good.bin").read_bytes()[:-2])


RAW = {"format": Raw(dtype="uint16"), "end_of_text": 9}
BAD = [
    ({"path": "missing.bin"}, at("path", "'missing.bin'", ".bin", ".npy")),
    ({"path": "missing*"}, at("path", "'missing*'")),
    ({"path": "."}, None),
    ({"path": ""}, at("path", "empty")),
    ({"path": ()}, at("path", "empty")),
    ({"path": "raw.bin"}, at("path", "raw.bin", "no known format", 'format = { type = "raw", dtype = "uint16" }')),
    ({"path": "letters.py"}, at("path", "letters.py", "no known format", 'type = "raw"')),
    (RAW | {"path": "good.bin"}, at("path", "good.bin", "format forge", "leave out")),
    (RAW | {"path": "good.npy"}, at("path", "good.npy", "format npy", "leave out")),
    (RAW | {"path": "odd.bin"}, at("path", "odd.bin", "5 bytes", "uint16", "2 bytes")),
    ({"path": "empty.bin"}, at("path", "empty.bin", "no tokens")),
    (RAW | {"path": "empty.bin"}, at("path", "empty.bin", "no tokens")),
    ({"path": "none.npy", "end_of_text": 9}, at("path", "none.npy", "no tokens")),
    ({"path": "float.npy"}, at("path", "float.npy", "float64", "(4,)", "integers")),
    ({"path": "square.npy"}, at("path", "square.npy", "int64", "(2, 2)", "one dimension")),
    ({"path": "text.npy"}, at("path", "text.npy", "numpy")),
    ({"path": "cut.npy"}, at("path", "cut.npy", 140, 144, "8 ids")),
    ({"path": "cut.bin"}, at("path", "cut.bin", 68, 70, "3 tokens")),
    ({"path": "good.npy"}, at("end_of_text", "good.npy")),
    ({"path": "good.bin", "end_of_text": 5}, at("end_of_text", 5, 9)),
    ({"path": "good.bin", "held_out_path": ("good.npy", "./good.bin")}, at("held_out_path", "good.bin")),
    (
        {"path": "good.bin", "held_out_path": "good.npy", "held_out_every": 5},
        at("held_out_path", "held_out_every = 5"),
    ),
    ({"path": "good.bin", "held_out_path": "nowhere"}, at("held_out_path", "'nowhere'")),
    ({"path": "good.bin", "verify": "full"}, at("verify", '"full"', "data prepare", "SHA-256")),
    ({"path": "good.bin", "vocab_size": 99}, at("path", "100 ids", "model.vocab_size = 99")),
]


@pytest.mark.parametrize(("keys", "expected"), [case for case in BAD if case[1]])
def test_a_mistake_is_told_with_what_to_write_instead(
    files: None, problems: Find, keys: dict[str, Any], expected: ExpectedProblem
) -> None:
    check_problems(problems(**keys), expected)


@pytest.mark.parametrize("path", ["missing.bin", "missing*"])
def test_where_a_missing_path_was_looked_for_is_named(problems: Find, here: Path, path: str) -> None:
    check_problems(problems(path=path), at("path", path, here))


@pytest.mark.parametrize(
    "keys",
    [
        {"path": "good.bin"},
        {"path": "good.npy", "end_of_text": 9},
        RAW | {"path": "raw.bin"},
        RAW | {"path": "dolma"},
    ],
)
def test_good_files_have_no_problem(files: None, problems: Find, keys: dict[str, Any]) -> None:
    assert problems(**keys, vocab_size=100) == []


def test_plain_ids_under_the_name_of_an_array_get_the_keys_that_read_them(files: None, problems: Find) -> None:
    """As Dolma and OLMo write them."""
    [problem] = problems(path="dolma")
    assert not lacks(problem.message, 'format = { type = "raw"')


def test_all_problems_are_told_at_once(files: None, problems: Find) -> None:
    found = problems(path=("missing", "float.npy", "cut.bin", "good.npy"), held_out_path="raw.bin")
    assert [problem.path for problem in found] == ["path", "path", "path", "held_out_path", "end_of_text"]


def test_no_ids_are_read_for_that(problems: Find) -> None:
    """A file of a terabyte, all of it a hole."""
    with open("huge.bin", "wb") as file:
        file.truncate(10**12)
    assert problems(path="huge.bin", format=Raw(dtype="uint16"), end_of_text=0) == []


def test_files_of_different_tokenizers_are_refused(problems: Find, here: Path) -> None:
    write_token_file("a", 100, 9)
    write_token_file("b", 200, 8)
    files = (f"{here}/a.bin", f"{here}/b.bin")
    check_problems(problems(path="*.bin"), at("path", *files, 9, 8), at("path", *files, 100, 200))


@pytest.mark.parametrize(
    ("suffix", "size", "facts"),
    [
        (".ends", 7, ["7 bytes", 8, "1 documents"]),
        (".ends", 16, ["16 bytes", 8, "1 documents"]),
        (".learned", 2, ["2 bytes", 1, "3 tokens"]),
    ],
)
def test_what_lies_beside_a_file_must_fit_it(
    problems: Find, here: Path, suffix: str, size: int, facts: list[object]
) -> None:
    write_token_file("a")
    Path(f"a{suffix}").write_bytes(bytes(size))
    check_problems(problems(path="a.bin"), at("path", f"{here}/a{suffix}", *facts))


def test_a_file_that_is_gone_after_it_was_listed_is_refused(here: Path) -> None:
    with refuses("", here / "gone.bin", "No such file"):
        read_shard(f"{here}/gone.bin")


def test_every_rank_must_see_the_files_that_rank_0_described(files: None, here: Path) -> None:
    """The copy of the data on a machine may differ from that of rank 0."""
    shard = read_shard("good.bin")
    check_visible([shard])
    longer = Path("good.bin").read_bytes() + bytes(1)
    Path("good.bin").write_bytes(longer)
    check_visible([shard])
    Path("good.bin").write_bytes(longer[:-2])
    with refuses("", here / "good.bin", "69 bytes", socket.gethostname(), 70, "rank 0"):
        check_visible([shard])
    os.remove("good.bin")
    with refuses("", here / "good.bin", socket.gethostname(), "No such file"):
        check_visible([shard])


# --- ids ---------------------------------------------------------------------------------------------------------


def test_ids_beyond_the_models_vocabulary_are_refused_with_file_and_place(
    open_documents: Callable[..., Any], here: Path
) -> None:
    np.save("a.npy", np.array([1, 2, 3, 50, 60], np.uint16))
    np.save("b.npy", np.array([1, 2], np.uint16))
    np.save("c.npy", np.array([5, 50], np.int64))
    fix = ("50 ids", "model.vocab_size", "format")
    with refuses_all(
        at("", f"{here}/a.npy", "token 3 is 50", *fix),
        at("", f"{here}/c.npy", "token 1 is 50", *fix),
    ):
        open_documents(path="*.npy", end_of_text=1, vocab_size=50)
    assert len(open_documents(path="*.npy", end_of_text=1, vocab_size=61)) == 9


def test_negative_ids_are_refused_whatever_the_vocabulary(open_documents: Callable[..., Any]) -> None:
    np.save("a.npy", np.array([1, -2], np.int16))
    with refuses("", "a.npy", "token 1 is -2", "format"):
        open_documents(path="a.npy", end_of_text=1)


def test_ids_are_looked_through_once_until_the_file_changes(
    open_documents: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_plugin_memmap import ids

    np.save("a.npy", np.array([1, 2], np.uint16))
    keys = {"path": "a.npy", "end_of_text": 1, "vocab_size": 50}
    open_documents(**keys)
    with monkeypatch.context() as patched:
        patched.setattr(ids, "blocks", lambda shard: pytest.fail("it was read"))
        open_documents(**keys)
    np.save("a.npy", np.array([1, 50], np.uint16))
    with refuses("", "token 1 is 50"):
        open_documents(**keys)


def test_files_share_one_folder_of_the_cache_and_a_killed_check_continues(
    open_documents: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_plugin_memmap import ids

    for number in range(4):
        np.save(f"{number}.npy", np.array([2 + number, 1], np.uint16))
    keys = {"path": "*.npy", "end_of_text": 1, "vocab_size": 50}
    monkeypatch.setattr("forge_kit.data.cache.SAVE_INTERVAL_S", 0.0)
    blocks, opened, read = ids.blocks, ids.cached_folder, []

    def note(shard: Any) -> Any:
        read.append(Path(shard.path).name)
        return blocks(shard)

    with monkeypatch.context() as patch:
        patch.setattr(ids, "blocks", lambda shard: os._exit(7) if shard.path.endswith("2.npy") else note(shard))
        assert exit_code_of_fork(lambda: open_documents(**keys)) == 7
    monkeypatch.setattr(ids, "blocks", note)
    folders = []
    monkeypatch.setattr(ids, "cached_folder", lambda *given, **more: folders.append(given[1]) or opened(*given, **more))
    open_documents(**keys)
    assert read == ["2.npy", "3.npy"]
    assert len(folders) == 1
    np.save("3.npy", np.array([51, 1], np.uint16))
    with refuses("", "3.npy", "token 0 is 51"):
        open_documents(**keys)


def test_ids_that_cannot_be_beyond_are_not_looked_through(
    open_documents: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_plugin_memmap import ids

    np.save("a.npy", np.array([1, 2], np.uint16))
    write_token_file("b", 50_000, 9)
    monkeypatch.setattr(ids, "blocks", lambda shard: pytest.fail("it was read"))
    open_documents(path="a.npy", end_of_text=1, vocab_size=65536)
    open_documents(path="b.bin", vocab_size=50_000)


# --- tokenizers --------------------------------------------------------------------------------------------------


def letters() -> Any:
    return Catalog.installed().load("tokenizer", "./letters.py:Letters")().build(None, None)


def test_the_end_of_text_must_be_that_of_the_jobs_tokenizer(open_documents: Callable[..., Any]) -> None:
    np.save("a.npy", np.array([1, 9], np.uint16))
    with refuses("", "a.npy", 9, 0, "[data.tokenizer]", "end_of_text"):
        open_documents(letters(), path="a.npy", end_of_text=9)
    assert len(open_documents(letters(), path="a.npy", end_of_text=0)) == 2


def test_the_vocabulary_must_be_that_of_the_jobs_tokenizer(open_documents: Callable[..., Any]) -> None:
    write_token_file("a", 100, 0)
    with refuses("", "a.bin", "100 ids", "[data.tokenizer]", 28):
        open_documents(letters(), path="a.bin")


# --- folders of data prepare -------------------------------------------------------------------------------------


@pytest.fixture
def prepared(prepare: Callable[..., str], here: Path) -> None:
    """The folder `data`, of four documents, two of them held out."""
    Path("a.jsonl").write_text("".join(f'{{"text": "{word}"}}\n' for word in ("aa", "bbb", "cc", "ddd")))
    prepare("a.jsonl", "--out=data", "--held-out-every=2")


def test_a_folder_stands_for_both_splits(prepared: None, open_documents: Callable[..., Any]) -> None:
    documents = open_documents(path="data")
    assert documents.tokens(0, 99).tolist() == [2, 2, 2, 0, 4, 4, 4, 0]
    assert documents.held_out.tokens(0, 99).tolist() == [1, 1, 0, 3, 3, 0]
    assert open_documents(path="data/train-*.bin").held_out is None


@pytest.mark.parametrize("format", ["datatrove", "megatron"])
def test_a_folder_for_another_library_states_splits_and_end_of_text_too(
    prepared: None, prepare: Callable[..., str], open_documents: Callable[..., Any], format: str
) -> None:
    prepare("a.jsonl", "--out=other", "--held-out-every=2", f"--format={format}")
    documents = open_documents(letters(), path="other")
    assert documents.end_of_text == 0
    assert documents.tokens(0, 99).tolist() == [2, 2, 2, 0, 4, 4, 4, 0]
    assert documents.ends().tolist() == [4, 8]
    assert documents.held_out.tokens(0, 99).tolist() == [1, 1, 0, 3, 3, 0]


def test_a_folder_of_another_version_of_the_format_is_refused(prepared: None, problems: Find) -> None:
    path = Path("data/manifest.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    facts = ("'data'", "format 2", "forge-plugin-memmap reads 1")
    check_problems(problems(path="data"), at("path", *facts))
    check_problems(PreparedTokenizer(path="data").problems(None, None), at("path", *facts))
    with refuses("path", *facts):
        PreparedTokenizer(path="data").build(None, list)


@pytest.mark.parametrize("splits", [{}, {"train": {"files": ["train-0.bin"]}}, {"train": [], "held_out": []}, None])
def test_a_manifest_without_the_files_of_both_splits_is_refused(prepared: None, problems: Find, splits: Any) -> None:
    path = Path("data/manifest.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"splits": splits}))
    check_problems(problems(path="data"), at("path", str(path), "prepare the data again"))


def test_a_folder_that_has_lost_its_tokenizer_is_refused(prepared: None) -> None:
    os.remove("data/tokenizer/component.json")
    with refuses("", "data/tokenizer/component.json", "No such file"):
        PreparedTokenizer(path="data").build(None, list)


def test_the_size_of_the_vocabulary_is_in_the_folder(prepared: None) -> None:
    tokenizer = PreparedTokenizer(path="data")
    assert tokenizer.expected_vocab_size() == tokenizer.build(None, list).vocab_size
    assert PreparedTokenizer(path="nowhere").expected_vocab_size() is None


def test_held_out_shards_are_not_trained_on_by_mistake(prepared: None, problems: Find) -> None:
    check_problems(problems(path="data/*.bin"), at("path", "data/held_out-00000.bin", "'data'", "train-*.bin"))
    check_problems(problems(path="data", held_out_every=2), at("held_out_every", "data prepare", 1))


def test_an_unfinished_folder_is_refused(prepared: None, problems: Find) -> None:
    os.rename("data/manifest.json", "data/unfinished.json")
    check_problems(problems(path=("data", "data/train-*.bin")), at("path", "'data'", "forge-run data prepare"))


def test_what_is_missing_or_foreign_in_a_folder_is_told(prepared: None, problems: Find) -> None:
    write_token_file("data/other", 28, 0)
    check_problems(problems(path="data"), at("path", "data/other.bin", "data prepare", "'data'"))
    os.remove("data/other.bin")
    os.remove("data/train-00000.ends")
    check_problems(problems(path="data"), at("path", "data/train-00000.ends", "manifest.json"))


def test_flipped_bytes_are_found_where_the_job_asks_for_full_verification(
    prepared: None, open_documents: Callable[..., Any]
) -> None:
    data = bytearray(Path("data/train-00000.bin").read_bytes())
    data[-4] ^= 1
    Path("data/train-00000.bin").write_bytes(data)
    documents = open_documents(path="data")
    with pytest.raises(DataError, match=naming("data/train-00000.bin: bytes 0", "CRC-32")):
        documents.tokens(0, 2)
    with refuses("", "SHA-256", "data/train-00000.bin"):
        open_documents(path="data", verify="full")


def test_flipped_bytes_of_the_index_are_found_before_it_is_used(
    prepared: None, open_documents: Callable[..., Any]
) -> None:
    data = bytearray(Path("data/train-00000.ends").read_bytes())
    data[0] ^= 1
    Path("data/train-00000.ends").write_bytes(data)
    documents = open_documents(path="data")
    with pytest.raises(DataError, match=naming("data/train-00000.ends: bytes 0", "CRC-32")):
        documents.ends()


def test_data_that_an_older_version_prepared_is_read_without_sums(
    prepared: None, open_documents: Callable[..., Any]
) -> None:
    table = json.loads(Path("data/manifest.json").read_text())
    for facts in table["files"].values():
        facts.pop("sums_of", None)
    Path("data/manifest.json").write_text(json.dumps(table))
    for path in Path("data").glob("*.crc32"):
        path.unlink()
    assert len(open_documents(path="data").tokens(0, 8)) == 8


def test_ids_that_have_left_the_vocabulary_since_the_start_end_with_a_sentence(
    here: Path, open_documents: Callable[..., Any]
) -> None:
    np.save(here / "raw.npy", np.arange(1000, dtype="<u2") % 20)
    documents = open_documents(path="raw.npy", end_of_text=9, vocab_size=100)
    changed = np.arange(1000, dtype="<u2") % 20
    changed[700] = 40_000
    np.save(here / "raw.npy", changed)
    with pytest.raises(DataError, match=naming("raw.npy", "token 700 is 40000", "100 ids")):
        documents.tokens(0, 10)


def test_the_tokenizer_must_be_the_one_that_made_the_data(prepared: None, open_documents: Callable[..., Any]) -> None:
    assert len(open_documents(letters(), path="data")) == 8
    another = letters()
    another.fingerprint = lambda: "another"
    with refuses("", "[data.tokenizer]", 'type = "prepared"', 'path = "data"'):
        open_documents(another, path="data")


def test_folders_of_different_tokenizers_are_refused(
    prepared: None, prepare: Callable[..., str], problems: Find
) -> None:
    source = Path("letters.py").read_text()
    Path("others.py").write_text(source.replace('b"letters"', 'b"others"'))
    prepare("a.jsonl", "--out=more", "--tokenizer=./others.py:Letters")
    check_problems(problems(path=("data", "more")), at("path", "data, more", "tokenizers"))


def test_no_numpy_is_needed_to_know_the_component(python_modules: Callable[[str], set[str]]) -> None:
    assert not python_modules("forge_plugin_memmap") & {"numpy", "torch", "pyarrow", "rich"}
