"""`forge-run data dedup`: planted duplicates, and the memory that is estimated before a phase starts."""

from __future__ import annotations

import json
import random
import re
import resource
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from cleaning_files import Command, lines_of, write_lines, write_table

from forge_plugin_datatrove.dedup import chance_of
from forge_plugin_datatrove.memory import clustering_need, merging_need

SIMILARITIES = {0.7: (51, 9), 0.8: (54, 6), 0.9: (57, 3)}
"""N-grams of both documents of a pair, and how many of each differ: (51 - 9) / (51 + 9) = 0.7."""
WORDS_OF_NGRAM = 5


def words(draw: random.Random, count: int) -> list[str]:
    """Words of letters: datatrove takes all numbers for one."""
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(count)]


def plant(path: Path, pairs: int, different: int) -> None:
    """Writes pairs of known Jaccard similarity of their 5-grams, and documents that have none in common.

    All words of a document differ, so exchanging the last m words changes its last m n-grams, and no other.
    """
    draw = random.Random(1)
    known = words(draw, 50_000)
    records = []
    for similarity, (ngrams, differ) in SIMILARITIES.items():
        for number in range(pairs):
            (*same,) = draw.sample(known, ngrams + WORDS_OF_NGRAM - 1)
            other = same[:-differ] + draw.sample(known, differ)
            records += [{"id": f"{similarity} {number} {k}", "text": " ".join(t)} for k, t in enumerate((same, other))]
    records += [{"id": f"different {n}", "text": " ".join(draw.sample(known, 58))} for n in range(different)]
    draw.shuffle(records)
    write_lines(path, records)


class TestMinHash:
    @pytest.mark.parametrize(
        ("pairs", "different", "tolerance"),
        [(100, 100, 0.1), pytest.param(1500, 10_000, 0.03, marks=[pytest.mark.thorough, pytest.mark.slow])],
        ids=["few", "many"],
    )
    def test_planted_pairs_are_found_at_the_rate_that_the_bands_predict(
        self, folder: Path, data: Command, pairs: int, different: int, tolerance: float
    ) -> None:
        plant(folder / "in/a.jsonl", pairs, different)
        write_table(folder, 'tasks = 2\n[dedup]\ntype = "minhash"\n')
        summary = data("dedup")
        removed = Counter(each["id"].split()[0] for each in lines_of(folder / "out/dedup/removed"))
        for similarity in SIMILARITIES:
            predicted = 1 - (1 - similarity**8) ** 14
            assert chance_of(similarity, 14, 8) == pytest.approx(predicted)
            assert removed[str(similarity)] / pairs == pytest.approx(predicted, abs=tolerance)
        assert removed["different"] == 0
        assert summary["found"]["0.8"] == pytest.approx(0.924, abs=1e-3)
        assert {each["reason"] for each in lines_of(folder / "out/dedup/removed")} == {"duplicate"}
        # One of each pair stays
        kept = Counter(tuple(each["id"].split()[:2]) for each in lines_of(folder / "out/dedup/documents"))
        assert len(kept) == 3 * pairs + different

    def test_clusters_are_named_if_the_table_wants_it(self, folder: Path, data: Command) -> None:
        text = " ".join(words(random.Random(0), 30))
        others = [" ".join(words(random.Random(n), 30)) for n in (1, 2)]
        texts = {"a": text, "b": others[0], "c": text, "d": text, "e": others[1], "f": others[0]}
        write_lines(folder / "in/a.jsonl", [{"id": id_, "text": text} for id_, text in texts.items()])
        write_table(folder, 'tasks = 1\n[dedup]\ntype = "minhash"\ncluster_ids = true\nnum_buckets = 2')
        data("dedup")
        kept = {each["id"]: each["minhash_cluster_id"] for each in lines_of(folder / "out/dedup/documents")}
        removed = {each["id"]: each["minhash_cluster_id"] for each in lines_of(folder / "out/dedup/removed")}
        assert {*kept} | {*removed} == {*texts}
        assert sorted(kept.values()) == [-1, 0, 1]
        assert Counter(removed.values()) == {0: 2, 1: 1}


class TestOtherMethods:
    def test_exact_keeps_the_first_of_equal_texts(self, folder: Path, data: Command) -> None:
        write_lines(folder / "in/a.jsonl", [{"id": str(n), "text": f"text {n % 3}"} for n in range(7)])
        write_table(folder, 'tasks = 1\n[dedup]\ntype = "exact"\n')
        data("dedup")
        assert [each["id"] for each in lines_of(folder / "out/dedup/documents")] == ["0", "1", "2"]
        assert [each["id"] for each in lines_of(folder / "out/dedup/removed")] == ["3", "4", "5", "6"]

    def test_sentences_are_cut_out_and_a_document_without_any_others_is_removed(
        self, folder: Path, data: Command
    ) -> None:
        draw = random.Random(0)

        def sentences(count: int) -> str:
            return " ".join(" ".join(words(draw, 6)).capitalize() + "." for _ in range(count))

        shared, own = sentences(3), sentences(8)
        texts = {"first": f"{sentences(3)} {shared}", "mixed": f"{shared} {own}", "copy": shared}
        write_lines(folder / "in/a.jsonl", [{"id": id_, "text": text} for id_, text in texts.items()])
        write_table(folder, 'tasks = 1\n[dedup]\ntype = "sentences"\nmin_doc_words = 10\n')
        summary = data("dedup")
        kept = {each["id"]: each["text"].strip() for each in lines_of(folder / "out/dedup/documents")}
        assert kept == {"first": texts["first"], "mixed": own}
        assert [each["id"] for each in lines_of(folder / "out/dedup/removed")] == ["copy"]
        [step] = summary["steps"]
        assert (step["removed"], step["changed"]) == (1, 1)

    def test_a_bloom_filter_removes_repeated_documents_in_order(self, folder: Path, data: Command) -> None:
        plant(folder / "in/a.jsonl", 0, 60)
        records = lines_of(folder / "in")
        write_lines(folder / "in/b.jsonl", [{**each, "id": f"again {each['id']}"} for each in records[:20]])
        table = '[dedup]\ntype = "bloom"\nm_bytes = {}\n{}'
        write_table(folder, table.format(2**20, ""))
        assert data("dedup", code=2).splitlines() == [
            "clean.toml:6: dedup.m_bytes: 1048576 leaves most of the filter unused; write a power of two less 1, "
            "such as 1048575",
            "clean.toml:4: dedup.k: required key is missing: the number of hashes, 0.7 m_bytes / (n-grams of all "
            "documents together)",
        ]
        write_table(folder, table.format(2**20 - 1, "k = 10"))
        data("dedup")
        assert [each["id"] for each in lines_of(folder / "out/dedup/removed")] == [
            f"again {each['id']}" for each in records[:20]
        ]


class TestMemory:
    def test_a_phase_that_does_not_fit_is_refused_with_the_figure_before_it_starts(
        self, folder: Path, data: Command
    ) -> None:
        plant(folder / "in/a.jsonl", 10, 10)
        table = 'tasks = 4\nmemory_gb = {}\n[dedup]\ntype = "minhash"\nlines_to_buffer = {}\n'
        write_table(folder, table.format(1e-5, -1))
        message = data("dedup", code=2)
        # Each of 14 tasks reads 4 files whole: 70 signatures of 8 hashes and a number
        assert "dedup, 2-buckets: needs about 4.48e-05 GB (1 tasks at the same time, each with 4 files" in message
        assert "1e-05 GB are available; lines_to_buffer = 5, or fewer workers" in message
        assert not [*(folder / "out/dedup/work/2-buckets/completions").glob("*")]
        assert len([*(folder / "out/dedup/work/1-signatures/completions").iterdir()]) == 4
        # The same command continues after the advice was followed, as nothing of the result has changed
        write_table(folder, table.format(1, 1))
        assert data("dedup")["memory"]["2-buckets"] == 4 * 10_000 + 4 * 68

    def test_more_open_files_than_the_machine_allows_are_refused(
        self, folder: Path, data: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plant(folder / "in/a.jsonl", 5, 0)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (66, 66))
        write_table(folder, 'tasks = 4\n[dedup]\ntype = "minhash"\n')
        message = data("dedup", code=2)
        assert "has 4 files of signatures open, and this machine allows 66; ulimit -n 68, or fewer tasks" in message

    MEASURE = """
import sys
from pathlib import Path
from datatrove.pipeline.dedup import MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster
config = MinhashConfig(num_buckets=1)
which, lines = sys.argv[1], int(sys.argv[2])
step = MinhashDedupCluster("pairs", "clusters", config=config)
if which == "merging":
    step = MinhashDedupBuckets("signatures", "pairs", config=config, lines_to_buffer=lines)
# The largest size of this program alone; getrusage has the one of the program that started it, too
peak = lambda: 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
before = peak()
step.run(None, 0, 1)
print(peak() - before)
"""

    @staticmethod
    def measured(which: str, lines: int = 5) -> int:
        command = [sys.executable, "-c", TestMemory.MEASURE, which, str(lines)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])

    def test_the_estimate_of_clusters_is_above_what_they_take_and_not_far(self, folder: Path) -> None:
        documents = 300_000
        pairs = np.empty((documents // 2, 4), dtype="<u4")
        pairs[:, 0], pairs[:, 2] = 70_000, 70_001
        pairs[:, 1] = np.arange(len(pairs)) * 2
        pairs[:, 3] = pairs[:, 1] + 1
        (folder / "pairs").mkdir()
        pairs.tofile(folder / "pairs/00000_00.dups")
        need = clustering_need(len(pairs), documents).bytes
        assert 0.5 * need < self.measured("clustering") < need

    def test_the_estimate_of_merging_files_in_whole_likewise(self, folder: Path) -> None:
        files, signatures = 200, 1000
        (folder / "signatures/bucket_000").mkdir(parents=True)
        draw = np.random.default_rng(0)
        record = struct.calcsize("<8QI")
        for number in range(files):
            rows = np.zeros(signatures, dtype=[(f"h{n}", "<u8") for n in range(8)] + [("document", "<u4")])
            rows["h0"] = np.sort(draw.integers(0, 2**60, signatures, dtype=np.uint64))
            rows["document"] = np.arange(signatures)
            rows.tofile(folder / f"signatures/bucket_000/{number:05}.minhash.sig")
        need = merging_need(files, files * signatures * record, -1, record, 1).bytes
        assert 0.5 * need < self.measured("merging", -1) < 1.1 * need


def test_options_are_checked_with_their_lines(folder: Path, data: Command) -> None:
    plant(folder / "in/a.jsonl", 1, 0)
    write_table(folder, '[dedup]\ntype = "minhahs"\n')
    assert "'minhahs' is no method; did you mean 'minhash'?" in data("dedup", code=2)
    write_table(folder, '[dedup]\ntype = "minhash"\nnum_bucket = 3\nhash_config.precision = 16\n')
    message = data("dedup", code=2)
    assert "clean.toml:6: dedup.num_bucket: unknown key; did you mean 'num_buckets'?" in message
    assert re.search(r"clean.toml:7: dedup.hash_config.precision: expected one of 32, 64, got int 16", message)
    write_table(folder, '[dedup]\ntype = "minhash"\nn_grams = 0\nlines_to_buffer = 0\n')
    message = data("dedup", code=2)
    assert "clean.toml:6: dedup.n_grams: 0, but must be at least 1" in message
    assert "clean.toml:7: dedup.lines_to_buffer: 0, but must be -1 (all) or at least 1" in message


def test_a_filter_comes_first(folder: Path, data: Command) -> None:
    """And ids, origins and records of both stages stay."""
    write_lines(folder / "in/a.jsonl", [{"id": str(n), "text": f"text {n % 2}"} for n in range(5)])
    write_table(folder, 'tasks = 1\n[[filter]]\ntype = "regex"\nregex_exp = "1"\n[dedup]\ntype = "exact"\n')
    assert data("filter")["kept"] == 3
    assert data("dedup")["kept"] == 1
    [kept] = lines_of(folder / "out/dedup/documents")
    assert (kept["id"], kept["origin"]) == ("0", {"file": "in/a.jsonl", "byte": 0})
    assert [data("filter", "--why", id_)["removed"][0]["stage"] for id_ in "1234"] == ["filter", "dedup"] * 2
    assert json.loads((folder / "out/dedup/summary.json").read_text())["documents"] == 3
