"""Counts of `forge-run data`: sources, fill, lengths, and what is learned."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from forge_plugin_plan.data_view.samples import Sample
from forge_plugin_plan.data_view.view import Lengths
from forge_testing.refusals import lacks

BEST_FIT = '[data.packing]\ntype = "forge-plugin-text/best_fit"\n'
ISOLATE = '[data.packing]\ntype = "forge-plugin-text/isolate"\n'


def runs(sample):
    return [(run["learned"], run["text"]) for run in sample["runs"] if run["kind"] == "text"]


def test_counts_of_a_source(write_job, as_json) -> None:
    facts = as_json(write_job("Chats", seq_len=8))
    [source] = facts["sources"]
    # Eight chats of `<ASK A>SAY B` and an end of text: 13 tokens and up to 3 letters more.
    tokens = sum(len(f"<ASK {'A' * (1 + n % 3)}>SAY {'B' * (1 + n % 2)}") + 1 for n in range(8))
    assert (source["documents"], source["tokens"], source["sequences"]) == (8, tokens, (tokens - 1) // 8)
    assert source["draws"] == 24
    assert source["epochs"] == pytest.approx(24 / ((tokens - 1) // 8))
    assert source["held_out"] == 4  # 26 tokens and a letter more
    assert source["type"].endswith("parts.py:Chats")
    assert facts["vocab_size"] == 32


def test_shares_and_epochs_follow_the_weights(here, write_job, as_json) -> None:
    more = 'name = "two"\nweight = 3.0\ncount = 80\n'
    job = write_job("Chats", seq_len=8)
    (here / job).write_text(
        (here / job)
        .read_text()
        .replace("[optimizer]", f'[[data.sources]]\ntype = "./parts.py:Chats"\n{more}[optimizer]')
    )
    first, second = as_json(job)["sources"]
    assert (first["share"], second["share"]) == (0.25, 0.75)
    assert second["epochs"] == pytest.approx(18 / second["sequences"])
    assert all(0 < source["learned"] < 1 for source in (first, second))


def test_the_answers_of_a_chat_are_learned_and_special_tokens_have_names(write_job, as_json) -> None:
    pytest.importorskip("forge_plugin_text.packing")
    samples = as_json(write_job("Chats", BEST_FIT, seq_len=20), *(f"--sample={n}" for n in range(4)))["samples"]
    for sample in samples:
        asked, answered = runs(sample)
        assert asked[0] is False
        assert asked[1].startswith("<|user|>ASK A")
        assert asked[1].endswith("<|answer|>")
        assert answered[0] is True
        assert answered[1].startswith("SAY B")
        assert answered[1].endswith("<end of text>")
        # As text may have these letters, too
        said = answered[1].removesuffix("<end of text>")
        pieces = [{"text": said, "special": False}, {"text": "<end of text>", "special": True}]
        assert sample["runs"][1]["pieces"] == pieces


def test_fill_counts_padding_and_what_is_not_learned(write_job, as_json) -> None:
    pytest.importorskip("forge_plugin_text.packing")
    facts = as_json(write_job("Chats", BEST_FIT, seq_len=20), *(f"--sample={n}" for n in range(4)), "--measure=4")
    fill = facts["fill"]
    assert fill["samples"] == 4
    assert fill["positions"] == 80
    texts = ["".join(text for _, text in runs(sample)) for sample in facts["samples"]]
    lengths = [len(t.replace("<|user|>", "<").replace("<|answer|>", ">").replace("<end of text>", "$")) for t in texts]
    assert fill["padding"] == sum(20 - (length - 1) for length in lengths)  # n tokens take n - 1 positions
    assert fill["learned"] == sum(len(text) for s in facts["samples"] for learned, text in _plain(s) if learned)
    assert fill["ignored"] == 80 - fill["learned"]


def _plain(sample):
    return [(learned, text.replace("<end of text>", "$")) for learned, text in runs(sample)]


def test_documents_that_are_kept_apart_are_numbered_and_their_first_token_is_not_learned(write_job, as_json) -> None:
    pytest.importorskip("forge_plugin_text.packing")
    [sample] = as_json(write_job("Talk", ISOLATE, seq_len=12))["samples"]
    documents = [run["document"] for run in sample["runs"]]
    assert documents == sorted(documents)
    assert max(documents) >= 1
    for number in range(max(documents) + 1):
        first = next(run for run in sample["runs"] if run["document"] == number)
        assert (first["learned"], first["positions"]) == (False, 1)
    assert sample["padding"] == 0


def test_a_conversation_is_one_document_whatever_its_template_writes_after_a_turn(write_job, as_json, data) -> None:
    facts = as_json(write_job("Turns", seq_len=10))
    assert facts["sources"][0]["documents"] == 16
    [sample] = facts["samples"]
    by_document: dict[int, list[int]] = {}
    for run in sample["runs"]:
        by_document.setdefault(run["document"], []).extend(run["ids"])
    # A window of 11 tokens over chats of 10
    assert len(by_document) == 2
    assert max(ids.count(31) for ids in by_document.values()) == 2


def test_documents_of_a_stream_end_with_the_end_of_text(write_job, as_json) -> None:
    facts = as_json(write_job("Talk", seq_len=12))
    [source] = facts["sources"]
    assert (source["documents"], source["tokens"], source["sequences"], source["epochs"]) == (None,) * 4
    by_document: dict[int, list[int]] = {}
    for run in facts["samples"][0]["runs"]:
        by_document.setdefault(run["document"], []).extend(run["ids"])
    assert [ids[-1] for ids in list(by_document.values())[:-1]] == [31] * (len(by_document) - 1)
    assert len(by_document) > 1


def test_labels_that_are_not_shifted_are_seen(write_job, as_json, data) -> None:
    assert as_json(write_job("Chats", seq_len=8))["labels_are_next_inputs"] is True
    job = write_job("Unshifted", seq_len=8)
    assert as_json(job)["labels_are_next_inputs"] is False
    assert not lacks(data(job)[1], "labels", "next input")


def test_images_are_placeholders_with_their_size(write_job, as_json) -> None:
    [sample] = as_json(write_job("Pictures"))["samples"]
    kinds = [(run["kind"], run["text"]) for run in sample["runs"]]
    assert kinds == [
        ("image", "[image, 2 x 3 patches: 6 positions]"),
        ("text", "AB"),
        ("image", "[image, 1 x 2 patches: 2 positions]"),
        ("text", "CD"),
        ("padding", ""),
    ]
    assert sample["images"] == [[1, 2, 3], [1, 1, 2]]
    assert sample["entries"]["patches"] == [8, 4]
    assert sample["padding"] == 3


def test_lengths_of_documents_are_counted_in_bins_of_powers_of_two() -> None:
    lengths = Lengths.of(np.cumsum([1, 2, 3, 4, 5, 8, 9]))
    assert lengths is not None
    assert lengths.bins == [(1, 1), (2, 1), (4, 2), (8, 2), (16, 1)]
    assert (lengths.documents, lengths.median, lengths.longest) == (7, 4, 9)
    assert Lengths.of(np.zeros(0, np.int64)) is None


def test_help_imports_neither_torch_nor_numpy() -> None:
    code = "import sys; from forge_core.cli import main\ntry: main(['data', '--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
    assert "forge-run data job.toml --step 100" in done.stdout


@pytest.mark.parametrize(("grids", "last"), [([(1, 1, 1)], 0), ([(0, 0, 0)], 0), ([], 2)])
def test_turns_of_a_chat_that_may_have_images_are_one_document(grids, last) -> None:
    ids = np.array([-1, 5, 0, 6, 0])  # 0 ends a turn, and texts
    rows = {"input_ids": ids, "labels": np.append(ids[1:], 7), **({"grids": np.array(grids)} if grids else {})}
    sample = Sample.of({name: torch.from_numpy(row)[None] for name, row in rows.items()}, 0)
    assert max(token.document for token in sample.tokens()) == last
