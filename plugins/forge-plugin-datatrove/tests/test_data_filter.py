"""`forge-run data filter`: what is kept, what is removed, and why."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from cleaning_files import Command, lines_of, write_lines, write_table
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.filters import C4QualityFilter, GopherRepetitionFilter, RegexFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

from forge_core.cli import main
from forge_plugin_datatrove.execution import owned

TEXTS = {
    "good": "The first sentence is long enough. Another sentence follows it. A third one ends the document.",
    "lines": "This line has a full stop at its end. It stays.\nmenu home about\nThe last line stays as well.",
    "braces": "A line with some code in it, such as { x } and no more. Another one follows here.",
    "twice": "the same words again " * 12,
    "secret": "There is a secret word in this text. It is matched by a pattern. The rest of it is fine.",
}
STEPS = """
[[filter]]
type = "gopher_repetition"
top_n_grams = [[2, 0.3], [3, 0.2]]

[[filter]]
type = "c4_quality"
min_num_sentences = -1

[[filter]]
type = "regex"
regex_exp = "secret"
"""


@pytest.fixture
def inputs(folder: Path) -> Path:
    write_lines(folder / "in/a.jsonl", [{"id": id_, "text": text, "url": f"u/{id_}"} for id_, text in TEXTS.items()])
    return folder


class TestAgainstDatatrove:
    """The same documents, reasons and texts as of a pipeline that is written in Python."""

    def test_it_keeps_and_removes_the_same(self, inputs: Path, data: Command) -> None:
        write_table(inputs, "tasks = 1" + STEPS)
        summary = data("filter")
        steps = [
            GopherRepetitionFilter(top_n_grams=((2, 0.3), (3, 0.2))),
            C4QualityFilter(min_num_sentences=-1),
            RegexFilter("secret"),
        ]
        for number, step in enumerate(steps):
            step.exclusion_writer = JsonlWriter(str(inputs / f"theirs/removed-{number}"), compression=None)
        LocalPipelineExecutor(
            [JsonlReader(str(inputs / "in")), *steps, JsonlWriter(str(inputs / "theirs/kept"), compression=None)],
            workers=1,
            logging_dir=str(inputs / "logs"),
        ).run()

        def kept(path: str) -> list[tuple[str, str]]:
            return [(each["id"], each["text"]) for each in lines_of(inputs / path)]

        assert kept("out/filter/documents") == kept("theirs/kept")
        assert [id_ for id_, _ in kept("theirs/kept")] == ["good", "lines"]
        theirs = {
            each["id"]: each["metadata"].get("filter_reason", "regex")
            for number in range(3)
            for each in lines_of(inputs / f"theirs/removed-{number}")
        }
        ours = {each["id"]: each["reason"] for each in lines_of(inputs / "out/filter/removed")}
        assert ours == theirs
        assert ours == {"twice": "top_2_gram", "braces": "curly_bracket", "secret": "regex"}
        assert [(step["documents"], step["removed"], step["changed"]) for step in summary["steps"]] == [
            (5, 1, 0),
            (4, 1, 1),
            (3, 1, 0),
        ]
        assert summary["steps"][1]["reasons"] == {"curly_bracket": 1}
        assert (summary["documents"], summary["kept"]) == (5, 2)
        assert summary["kept_characters"] == sum(len(text) for _, text in kept("theirs/kept"))


class TestIds:
    def test_other_keys_and_the_origin_stay(self, inputs: Path, data: Command) -> None:
        write_table(inputs, "tasks = 1" + STEPS)
        data("filter")
        first, _ = lines_of(inputs / "out/filter/documents")
        assert first == {
            "id": "good",
            "text": TEXTS["good"],
            "url": "u/good",
            "origin": {"file": "in/a.jsonl", "byte": 0},
        }

    def test_a_place_stands_for_a_missing_id_and_is_the_same_for_any_number_of_tasks(
        self, folder: Path, data: Command
    ) -> None:
        """Parts cut files between lines: the place is the byte at which the line begins."""
        write_lines(folder / "in/a.jsonl", [{"text": f"number {n}"} for n in range(40)])
        found = []
        for tasks in (1, 7):
            write_table(folder, f'tasks = {tasks}\n[[filter]]\ntype = "regex"\nregex_exp = "3$"')
            (folder / "clean.toml").write_text((folder / "clean.toml").read_text().replace('"out"', f'"out{tasks}"'))
            data("filter")
            kept, removed = (lines_of(folder / f"out{tasks}/filter/{name}") for name in ("documents", "removed"))
            assert len(list((folder / f"out{tasks}/filter/documents").iterdir())) == tasks
            found.append(([(each["id"], each["text"]) for each in kept], [each["id"] for each in removed]))
        assert found[0] == found[1]
        text = (folder / "in/a.jsonl").read_bytes()
        for id_ in found[0][1]:
            name, _, byte = id_.partition(":")
            assert json.loads(text[int(byte) :].partition(b"\n")[0])["text"].endswith("3")
            assert name == "in/a.jsonl"

    def test_all_formats_of_data_prepare_are_read(self, folder: Path, data: Command) -> None:
        (folder / "in").mkdir()
        table = pyarrow.table({"text": ["row one", None, "row three"], "id": [7, 8, 9], "lang": ["en", "en", "de"]})
        pyarrow.parquet.write_table(table, folder / "in/a.parquet", row_group_size=2)
        with gzip.open(folder / "in/b.jsonl.gz", "wt") as file:
            file.write('{"text": "packed"}\nno json\n{"text": ""}\n')
        (folder / "in/c.txt").write_text("a whole file\nof text")
        write_table(folder, 'tasks = 3\n[[filter]]\ntype = "regex"\nregex_exp = "never"')
        summary = data("filter")
        kept = {each["id"]: (each["text"], each["origin"]) for each in lines_of(folder / "out/filter/documents")}
        assert kept == {
            "7": ("row one", {"file": "in/a.parquet", "row": 1}),
            "9": ("row three", {"file": "in/a.parquet", "row": 3}),
            "in/b.jsonl.gz:0": ("packed", {"file": "in/b.jsonl.gz", "byte": 0}),
            "in/c.txt": ("a whole file\nof text", {"file": "in/c.txt"}),
        }
        assert summary["unreadable"] == {"empty": 1, "not JSON": 1, "not a string": 1}
        unread = {each["id"]: each["reason"] for each in lines_of(folder / "out/filter/removed")}
        assert unread == {"in/a.parquet:2": "not a string", "in/b.jsonl.gz:19": "not JSON", "in/b.jsonl.gz:27": "empty"}


class TestFate:
    def test_it_is_known_by_id(self, inputs: Path, data: Command, capsys: pytest.CaptureFixture[str]) -> None:
        write_table(inputs, STEPS)
        data("filter")
        assert data("filter", "--why", "secret")["removed"] == [
            {
                "id": "secret",
                "stage": "filter",
                "step": "regex",
                "reason": "regex",
                "origin": {"file": "in/a.jsonl", "byte": json.loads(origin_of(inputs, "secret"))["byte"]},
                "characters": len(TEXTS["secret"]),
            }
        ]
        kept = data("filter", "--why", "lines")["kept"]
        line = Path(kept["file"]).read_text().splitlines()[kept["line"] - 1]
        assert json.loads(line)["id"] == "lines"
        assert "no document of this id in out (filter)" in data("filter", "--why", "nobody", code=2)
        assert main(["data", "filter", "clean.toml", "--why", "braces"]) == 0
        assert "removed by filter, c4_quality: curly_bracket" in capsys.readouterr().out

    def test_ids_and_origins_may_have_any_form(
        self, folder: Path, data: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # The backslashes and quotes of the first are others in a line of JSON
        ids = {'C:\\a "b".txt': "https://example.org/1", "m\u00fcll": {"url": "https://example.org/2"}, "none": None}
        lines = [json.dumps({"id": id_, "origin": origin, "text": "kept"}) for id_, origin in ids.items()]
        (folder / "in").mkdir()
        (folder / "in/a.jsonl").write_text("\n".join(lines))
        write_table(folder, '[[filter]]\ntype = "regex"\nregex_exp = "never"')
        data("filter")
        shown = []
        for id_, origin in ids.items():
            assert data("filter", "--why", id_)["kept"]["origin"] == origin
            assert main(["data", "filter", "clean.toml", "--why", id_]) == 0
            shown.append(capsys.readouterr().out.strip().partition("read from ")[2])
        assert shown == ["https://example.org/1", '{"url": "https://example.org/2"}', "null"]


def origin_of(folder: Path, id_: str) -> str:
    text = (folder / "in/a.jsonl").read_text()
    return json.dumps({"byte": text.index(f'{{"id": "{id_}"')})


class TestProblems:
    def test_all_are_named_with_their_lines_before_anything_runs(self, inputs: Path, data: Command) -> None:
        write_table(
            inputs,
            '[[filter]]\ntype = "gopher_qualiti"\n[[filter]]\ntype = "gopher_quality"\nmin_doc_word = 3\n'
            'max_doc_words = "many"\n[[filter]]\ntype = "regex"\n[[filter]]\ntype = "regex"\nregex_exp = "("\n'
            '[[filter]]\nmin = 3\n[[filter]]\ntype = "nowhere:Step"\n',
        )
        assert data("filter", code=2).splitlines() == [
            "clean.toml:5: filter.0.type: 'gopher_qualiti' is no step here; did you mean 'gopher_quality'?; your own "
            'is "my_module:MyStep"',
            "clean.toml:9: filter.1.max_doc_words: expected int, got str 'many'",
            "clean.toml:8: filter.1.min_doc_word: unknown key; did you mean 'min_doc_words'?",
            "clean.toml:10: filter.2.regex_exp: required key is missing; expected str",
            "clean.toml:12: filter.3: regex refuses its options: missing ), unterminated subpattern at position 0",
            "clean.toml:15: filter.4.type: required key is missing; one of c4_bad_words, c4_paragraph, c4_quality, "
            "fasttext, fineweb_quality, ftfy, gopher_quality, gopher_repetition, language, pii, regex, sampler, "
            "symbol_lines, unigram_log_probs, url",
            "clean.toml:18: filter.5.type: nowhere:Step cannot be imported: No module named 'nowhere'",
        ]
        assert not (inputs / "out").exists()

    def test_a_step_that_would_fetch_a_file_is_refused(
        self, inputs: Path, data: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = inputs / "assets"
        monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(cache))
        write_table(
            inputs,
            '[[filter]]\ntype = "unigram_log_probs"\n[[filter]]\ntype = "c4_quality"\nlanguage = "bel"\n'
            '[[filter]]\ntype = "fasttext"\nmodel_url = "model.bin"\n',
        )
        lines = data("filter", code=2).splitlines()
        assert "unigram_freq.csv; put the file there, or allow it by download = true" in lines[0]
        assert "Stanza's model of bel" in lines[1] or "Please install `stanza`" in lines[1]
        assert "its model from model.bin, which is no file here" in lines[2]
        # Once its file is there, nothing is fetched
        file = next(word for word in lines[0].split() if word.startswith(str(cache))).rstrip(";")
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("word,count\nthe,3\nfirst,1\n")
        write_table(inputs, '[[filter]]\ntype = "unigram_log_probs"\nlogprobs_threshold = -100\n')
        assert data("filter")["kept"] == len(TEXTS)

    def test_a_missing_package_comes_with_the_line_that_installs_it(
        self, inputs: Path, data: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("datatrove.utils._import_utils._is_package_available", lambda name: False)
        write_table(inputs, '[[filter]]\ntype = "url"\n')
        assert "filter.0: Please install `ahocorasick`,`fasteners` and `tldextract`" in data("filter", code=2)

    def test_a_table_that_is_missing_is_named(self, inputs: Path, data: Command) -> None:
        write_table(inputs, "")
        assert "filter: there is no table [[filter]]; add one with a type" in data("filter", code=2)

    def test_nothing_of_a_users_is_written_over(self, inputs: Path, data: Command) -> None:
        (inputs / "out/filter").mkdir(parents=True)
        (inputs / "out/filter/mine.txt").write_text("mine")
        write_table(inputs, STEPS)
        assert "output out/filter is not empty; name a new folder" in data("filter", code=2)
        assert [path.name for path in (inputs / "out/filter").iterdir()] == ["mine.txt"]

    def test_a_column_of_bytes_is_refused(self, folder: Path, data: Command) -> None:
        (folder / "in").mkdir()
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "image": [b"\0"]}), folder / "in/a.parquet")
        write_table(folder, STEPS)
        assert "in/a.parquet: column image holds bytes, which JSON lines cannot have" in data("filter", code=2)


class TestContinuing:
    STEP = """
from pathlib import Path
from datatrove.pipeline.filters.base_filter import BaseFilter


class Fails(BaseFilter):
    name = "fails"

    def __init__(self, exclusion_writer=None):
        super().__init__(exclusion_writer)

    def filter(self, doc):
        with open("met", "a") as file:
            file.write(doc.id + " ")
        if doc.id == "19" and Path("broken").exists():
            raise RuntimeError("the disk is on fire")
        return doc.id != "15"
"""

    def test_tasks_that_are_complete_are_not_run_again(self, folder: Path, data: Command) -> None:
        write_lines(folder / "in/a.jsonl", [{"id": str(n), "text": "x" * 20} for n in range(10, 22)])
        (folder / "my_steps.py").write_text(self.STEP)
        (folder / "broken").touch()
        table = 'tasks = 3\n[[filter]]\ntype = "my_steps:Fails"\n'
        write_table(folder, table)
        message = data("filter", code=1)
        assert "data filter, 1-filter: RuntimeError: the disk is on fire; see " in message
        log = message.partition("see ")[2].partition(";")[0]
        assert "the disk is on fire" in Path(log).read_text()
        assert not (folder / "out/filter/documents").exists(), "nothing that is not whole has this name"
        write_table(folder, table + '[dedup]\ntype = "exact"\n')
        assert "out/filter is not finished; run forge-run data filter clean.toml first" in data("dedup", code=2)
        (folder / "broken").unlink()
        (folder / "met").unlink()
        assert data("filter")["kept"] == 11
        assert (folder / "met").read_text().split() == ["18", "19", "20", "21"]
        assert [each["id"] for each in lines_of(folder / "out/filter/documents")] == [
            str(n) for n in range(10, 22) if n != 15
        ]
        assert [each["id"] for each in lines_of(folder / "out/filter/removed")] == ["15"]

    def test_a_finished_folder_is_read_and_other_arguments_are_refused(self, inputs: Path, data: Command) -> None:
        write_table(inputs, STEPS)
        first = data("filter")
        before = (inputs / "out/filter/summary.json").stat().st_mtime_ns
        assert data("filter") == first
        assert (inputs / "out/filter/summary.json").stat().st_mtime_ns == before
        write_table(inputs, STEPS.replace("secret", "other"))
        assert "out/filter was begun with other arguments; remove it" in data("filter", code=2)
        write_table(inputs, STEPS)
        write_lines(inputs / "in/b.jsonl", [{"text": "new"}])
        assert "out/filter was begun with other inputs" in data("filter", code=2)


def test_a_process_that_outlives_a_killed_command_does_not_hold_its_folder(folder: Path) -> None:
    """datatrove forks a manager, which is not killed with the command."""
    program = """
import os, signal, time
from pathlib import Path
from forge_plugin_datatrove.execution import owned
with owned(Path("filter")):
    if os.fork() == 0:
        os.closerange(0, 3)
        time.sleep(60)
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, start_new_session=True, text=True)
    try:
        assert killed.returncode == -signal.SIGKILL
        with owned(Path("filter")):
            pass
    finally:
        os.killpg(int(killed.stdout), signal.SIGKILL)


def test_data_prepare_reads_what_is_kept(inputs: Path, data: Command) -> None:
    write_table(inputs, STEPS)
    data("filter")
    assert main(["data", "prepare", "out/filter/documents", "--out", "tokens", "--tokenizer", "bytes"]) == 0
    manifest = json.loads((inputs / "tokens/manifest.json").read_text())
    assert manifest["splits"]["train"]["documents"] == 2
    # From a token back to the line of the first input
    table = pyarrow.parquet.read_table(inputs / "tokens/train-00000.origins").to_pydict()
    assert table["id"] == ["good", "lines"]
    assert json.loads(table["origin"][0]) == {"file": "in/a.jsonl", "byte": 0}
