"""Datasets that are read as a whole: every row once, tokenised once."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from pathlib import Path

import datasets
import pytest

from forge_core import load_job
from forge_core.contracts.data import Documents
from forge_core.contracts.errors import ForgeError
from forge_kit.data.cache import cache_root
from forge_kit.tools.outputs import mark_output
from forge_plugin_huggingface import HuggingFace
from forge_plugin_huggingface import tokens as token_files
from forge_plugin_huggingface.source import DescribedSource, Origin
from forge_testing.processes import endanger_forks, exit_code_of_fork
from forge_testing.refusals import at, check_problems, naming, refuses

FORMATS = ["jsonl", "parquet", "saved"]


def numbered(start: int, stop: int, field: str = "text") -> list[dict[str, object]]:
    return [{field: f"document {number}", "id": number} for number in range(start, stop)]


def names(*numbers: int) -> list[str]:
    return [f"document {number}" for number in numbers]


@pytest.mark.parametrize("format_", FORMATS)
def test_documents_are_the_rows_in_order_each_ended_by_end_of_text(
    write, build_dataset, texts_of, format_: str
) -> None:
    documents = build_dataset(write(format_, numbered(0, 3), numbered(3, 700)))
    assert isinstance(documents, Documents)
    assert texts_of(documents) == names(*range(700))
    assert documents.learned(0, 9) is None
    text_bytes = sum(map(len, names(*range(700))))
    assert documents.bytes_per_token == text_bytes / (text_bytes + 700)


def test_rows_without_text_are_left_out(write, build_dataset, texts_of) -> None:
    rows = [{"text": ""}, {"text": "one"}, {"text": None}, {"text": "two"}]
    assert texts_of(build_dataset(write("jsonl", rows))) == ["one", "two"]


def test_another_field_may_hold_the_text(write, build_dataset, texts_of) -> None:
    assert texts_of(build_dataset(write("jsonl", numbered(0, 2, field="body")), field="body")) == names(0, 1)


def test_splits_are_found_by_the_names_of_files_or_named(tmp_path: Path, build_dataset, texts_of) -> None:
    for name, numbers in (("train", (0, 3)), ("test", (3, 5))):
        rows = "".join(json.dumps(row) + "\n" for row in numbered(*numbers))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    documents = build_dataset(str(tmp_path), held_out_split="test")
    assert (texts_of(documents), texts_of(documents.held_out)) == (names(0, 1, 2), names(3, 4))
    data_files = {"train": "test.jsonl", "validation": "train.jsonl"}
    assert texts_of(build_dataset(str(tmp_path), data_files=data_files, split="validation")) == names(0, 1, 2)
    assert texts_of(build_dataset(str(tmp_path), data_files="test.jsonl")) == names(3, 4)
    assert texts_of(build_dataset("json", data_files=(f"{tmp_path}/train.jsonl", f"{tmp_path}/test.jsonl"))) == names(
        *range(5)
    )


def test_a_saved_folder_may_have_splits(tmp_path: Path, build_dataset, texts_of) -> None:
    splits = {"train": datasets.Dataset.from_list(numbered(0, 2)), "dev": datasets.Dataset.from_list(numbered(2, 4))}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path))
    documents = build_dataset(str(tmp_path), held_out_split="dev")
    assert (texts_of(documents), texts_of(documents.held_out)) == (names(0, 1), names(2, 3))


def test_a_part_of_a_split_may_be_named(write, build_dataset, texts_of) -> None:
    folder = write("jsonl", numbered(0, 10))
    documents = build_dataset(folder, split="train[:60%]", held_out_split="train[80%:]")
    assert (texts_of(documents), texts_of(documents.held_out)) == (names(*range(6)), names(8, 9))


def test_parts_with_rows_in_common_are_an_error(write, build_dataset) -> None:
    folder = write("jsonl", numbered(0, 10))
    with refuses("held_out_split", "'train[50%:]'", "split = 'train[:60%]'", "5 to 5", "'train'"):
        build_dataset(folder, split="train[:60%]", held_out_split="train[50%:]")
    with refuses("held_out_split", "'train[9:]'", "9 to 9", "'train'"):
        build_dataset(folder, held_out_split="train[9:]")


@pytest.mark.parametrize("format_", FORMATS)
def test_every_nth_row_is_held_out_starting_with_the_first(write, build_dataset, texts_of, format_: str) -> None:
    documents = build_dataset(write(format_, numbered(0, 4), numbered(4, 8)), held_out_every=3)
    assert texts_of(documents) == names(1, 2, 4, 5, 7)
    assert texts_of(documents.held_out) == names(0, 3, 6)


def test_of_the_rows_held_out_the_first_are_enough(write, build_dataset, texts_of) -> None:
    documents = build_dataset(write("jsonl", numbered(0, 8)), held_out_every=3, held_out_documents=2)
    assert texts_of(documents) == names(1, 2, 4, 5, 7)
    assert texts_of(documents.held_out) == names(0, 3)


def test_texts_for_a_tokenizer_to_be_trained_on_are_those_not_held_out(write) -> None:
    folder = write("jsonl", [*numbered(0, 5), {"text": None, "id": 5}])
    for streaming in (False, True):
        component = HuggingFace(path=folder, held_out_every=2, streaming=streaming)
        assert list(component.documents()) == names(1, 3)
    assert list(HuggingFace(path=folder, messages="text").documents()) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [('"*.jsonl"', "*.jsonl"), ('["a", "b"]', ("a", "b")), ('{train = "a", test = "b"}', {"train": "a", "test": "b"})],
)
def test_a_job_file_names_data_files_as_one_a_list_or_by_split(
    write, pretrained, catalog, tmp_path: Path, given: str, expected: object
) -> None:
    (tmp_path / "job.toml").write_text(f"""
        train = {{steps = 1, global_batch_size = 4, seq_len = 8}}
        model.type = "forge_testing:TinyModel"
        optimizer.type = "forge_testing:TinyAdamW"
        data.tokenizer = {{type = "auto", path = "{pretrained()}", chat_variables = {{date = "today", think = false}}}}
        data.sources = [{{type = "huggingface", path = "{write("jsonl", numbered(0, 1))}", data_files = {given}}}]
    """)
    job = load_job(tmp_path / "job.toml", catalog=catalog)
    assert job.data.sources[0].data_files == expected
    assert job.data.tokenizer.chat_variables == {"date": "today", "think": False}


# --- tokenised once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", FORMATS)
def test_a_second_start_encodes_nothing_and_reads_no_row(
    write, build_dataset, letters, texts_of, monkeypatch: pytest.MonkeyPatch, format_: str
) -> None:
    folder = write(format_, numbered(0, 5))
    build_dataset(folder, held_out_every=2)
    assert letters.encoded == 5
    monkeypatch.setattr(token_files, "TableRows", lambda *_: pytest.fail("rows were read"))
    documents = build_dataset(folder, held_out_every=2)
    assert letters.encoded == 5
    assert (texts_of(documents), texts_of(documents.held_out)) == (names(1, 3), names(0, 2, 4))


@pytest.mark.parametrize("format_", FORMATS)
def test_data_that_changed_is_tokenised_again(write, build_dataset, letters, texts_of, format_: str) -> None:
    build_dataset(write(format_, numbered(0, 3)))
    shutil.rmtree(write(format_, numbered(0, 3)))
    folder = write(format_, numbered(3, 6))
    for path in Path(folder).rglob("*.*"):
        os.utime(path, (1, 1))  # another time than before, whatever the clock's resolution
    assert texts_of(build_dataset(folder)) == names(3, 4, 5)


def test_other_settings_have_their_own_token_files_and_share_what_they_can(write, build_dataset, letters) -> None:
    folder = write("jsonl", [{"text": "a", "body": "b"}] * 6)
    build_dataset(folder)
    build_dataset(folder, field="body")
    assert letters.encoded == 12
    build_dataset(folder, held_out_every=3)
    assert letters.encoded == 18
    build_dataset(folder, held_out_every=3, held_out_documents=1)
    assert letters.encoded == 19


def test_damage_to_cached_tokens_is_made_good(write, build_dataset, texts_of, caches: Path) -> None:
    folder = write("jsonl", numbered(0, 3))
    build_dataset(folder)
    [path] = (caches / "tokens").glob("*/tokens.bin")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert texts_of(build_dataset(folder, verify="full")) == names(0, 1, 2)


def test_any_number_of_processes_gives_the_same_files(write, build_dataset, caches: Path, monkeypatch) -> None:
    folder = write("parquet", numbered(0, 3000))
    found = {}
    for processes in (1, 3):
        monkeypatch.setenv("FORGE_CACHE", str(caches / str(processes)))
        build_dataset(folder, processes=processes)
        paths = sorted(cache_root().glob("tokens/*/tokens.*"))
        found[processes] = {path.relative_to(cache_root()): path.read_bytes() for path in paths}
    assert found[1] == found[3]
    assert {path.suffix for path in found[1]} == {".bin", ".crc32", ".ends"}


def test_an_error_in_a_process_arrives(write, build_dataset) -> None:
    folder = write("jsonl", [{"text": 1}] * 600)
    with refuses("", "row 0", repr(folder), "'train'", "'text'", "int '1'"):
        build_dataset(folder, processes=2)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_dataset_without_text_is_an_error_and_not_cached(write, build_dataset, caches: Path) -> None:
    folder = write("jsonl", [{"text": ""}])
    with refuses("", repr(folder), "'train'", "none of 1", "text"):
        build_dataset(folder)
    assert list((caches / "tokens").iterdir()) == []


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("format_", FORMATS)
def test_a_missing_field_is_an_error_that_lists_those_there(
    write, build_dataset, format_: str, streaming: bool
) -> None:
    folder = write(format_, numbered(0, 3))
    with refuses("", repr(folder), "'train'", "'body'", "'text', 'id'", "`field`", "`messages`"):
        build_dataset(folder, field="body", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_split_is_an_error_that_lists_those_there(write, build_dataset, streaming: bool) -> None:
    folder = write("jsonl", numbered(0, 3))
    with refuses("split", "dev", "'train'", f"the folder {folder}"):
        build_dataset(folder, split="dev", streaming=streaming)


def test_a_missing_split_of_a_saved_folder_is_a_problem_already(write, problems) -> None:
    folder = write("saved", numbered(0, 3))
    assert problems(HuggingFace(path=folder)) == []
    dataset = datasets.Dataset.from_list(numbered(0, 3), split="dev")
    dataset.save_to_disk(folder)
    check_problems(problems(HuggingFace(path=folder)), at("split", repr(folder), "'train'", "'dev'"))
    found = problems(HuggingFace(path=folder, split="dev", held_out_split="test"))
    check_problems(found, at("held_out_split", repr(folder), "'test'", "'dev'"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_name_that_cannot_be_had_is_an_error_that_says_what_was_tried(build_dataset, streaming: bool) -> None:
    with refuses("path", "'nobody/nothing'", "ConnectionError", f"{Path.cwd()}/nobody/nothing", "HF_HUB_OFFLINE"):
        build_dataset("nobody/nothing", streaming=streaming)


def test_a_folder_without_data_is_an_error(tmp_path: Path, build_dataset) -> None:
    with refuses("path", "EmptyDatasetError", f"the folder {tmp_path}"):
        build_dataset(str(tmp_path))


def test_files_that_are_damaged_are_an_error(tmp_path: Path, build_dataset) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ')
    with refuses("path", "DatasetGenerationError", f"the folder {tmp_path}"):
        build_dataset(str(tmp_path))


def test_documents_need_a_tokenizer(write, problems, make_context) -> None:
    component = HuggingFace(path=write("jsonl", numbered(0, 3)))
    check_problems(problems(component, component=None), at("", "[data.tokenizer]", 'type = "auto"'))
    context = make_context()
    context.tokenizer = None
    with refuses("", "[data.tokenizer]"):
        component.build(context)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"path": ""}, at("path")),
        ({"path": "./none"}, at("path", "'./none'", Path.cwd())),
        ({"path": "a/b/c"}, at("path", "'a/b/c'", Path.cwd())),
        ({"path": "json"}, at("data_files", "path = 'json'")),
        ({"revision": "main"}, at("revision", "'main'", "data", "folder")),
        ({"messages": "chat", "field": "body"}, at("field", "'body'", "messages = 'chat'")),
        ({"tools": "tools"}, at("tools", "`messages`")),
        ({"held_out_split": "test", "held_out_every": 2}, at("held_out_split", "held_out_every = 2")),
        ({"held_out_split": "train"}, at("held_out_split", "'train'")),
        ({"held_out_documents": 2}, at("held_out_documents", "held_out_split", "held_out_every")),
        ({"lanes": 2}, at("lanes", 2, "streaming = true")),
        ({"shuffle": 2}, at("shuffle", 2, "streaming = true")),
        ({"streaming": True, "held_out_every": 2}, at("held_out_documents", "held_out_every", "stream")),
        ({"streaming": True, "processes": 2}, at("processes", "stream", "[data] workers")),
        ({"streaming": True, "split": "train[:9]"}, at("split", "'train[:9]'", "stream")),
        ({"streaming": True, "lanes": 3}, at("lanes", 3, "train.global_batch_size = 4")),
        ({}, None),
        ({"path": "owner/name", "revision": "main", "config": "en", "streaming": True, "lanes": 2}, None),
    ],
)
def test_mistakes_that_show_without_reading_are_problems(write, problems, keys, expected) -> None:
    data = write("jsonl", numbered(0, 1))
    tokenizer = type("Tokenizer", (), {"chats": True})()
    found = problems(HuggingFace(**{"path": data, **keys}), component=tokenizer)
    check_problems(found, *([expected] if expected else []))


def test_keys_that_mean_nothing_for_a_saved_folder_are_problems(write, problems) -> None:
    folder = write("saved", numbered(0, 1))
    found = problems(HuggingFace(path=folder, config="en", revision="main", data_files="*.jsonl"))
    check_problems(found, at("config", "'en'", "save_to_disk"), "revision", "data_files")


def test_what_forge_wrote_below_a_folder_is_no_data(write, build_dataset, texts_of) -> None:
    folder = Path(write("jsonl", numbered(0, 2), name="data/made")).parent
    mark_output(folder / "made")
    with refuses("path", repr(str(folder))):
        build_dataset(str(folder))
    write("jsonl", numbered(2, 3))
    assert texts_of(build_dataset(str(folder))) == names(2)


def test_a_process_that_is_killed_while_it_tokenises_is_named():
    def work(task: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ForgeError, match=naming("tokenises", "killed")):
        list(token_files.in_order(work, iter(range(4)), 2))


def test_a_process_that_tokenises_does_not_free_a_group_that_it_inherits():
    """Of a run before, in a notebook: it would wait for the group's threads, which a fork does not copy."""

    def tokenise() -> None:
        endanger_forks()
        assert list(token_files.in_order(abs, iter(range(4)), 2)) == [0, 1, 2, 3]

    assert exit_code_of_fork(tokenise, timeout=30) == 0


def test_a_source_that_rank_0_described_is_read_on_a_machine_with_another_cache(write, tmp_path, monkeypatch):
    path = write("parquet", [{"text": "a"}, {"text": "b"}])
    described = DescribedSource.of(Origin(path), ["train"])
    assert described.source.table("train")["text"][:] == ["a", "b"]
    sent = pickle.dumps(described)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "elsewhere")
    received = pickle.loads(sent)
    assert received.fingerprints == described.fingerprints
    table = received.source.table("train")
    assert table["text"][:] == ["a", "b"]
    assert all(file["filename"].startswith(str(tmp_path / "elsewhere")) for file in table.cache_files)
