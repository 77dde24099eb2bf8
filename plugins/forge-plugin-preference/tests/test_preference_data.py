"""The dataset `pairs`: what rows hold, what does not fit, chats, and lines that are malformed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
from preference_runs import LENGTH, pair_lines, preference_job, single_lines, write_lines
from tokenizers import AddedToken, Tokenizer, models
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from forge_core.contracts.errors import JobError
from forge_core.engine.build import build_context, build_tokenizer
from forge_core.losses import CrossEntropy
from forge_plugin_huggingface import Auto
from forge_plugin_preference import DPO, KTO, Pairs, SimPO
from forge_plugin_preference.answers import CHOSEN, KINDS, MISMATCHED, REFERENCE, REJECTED
from forge_plugin_preference.rows import Rows
from forge_plugin_text import Bytes
from forge_testing import job_problems
from forge_testing.catalogs import installed
from forge_testing.suites import DatasetSuite


def build(folder: Path, lines: list[Any], loss: Any = None, *, tokenizer: Any = None, **keys: Any) -> Rows:
    """The rows of a file; other keys are those of `pairs`, and `seq_len`."""
    length = keys.pop("seq_len", LENGTH)
    path = folder / "lines.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    data = {"tokenizer": Bytes(), "sources": (Pairs(path=str(path), **keys),)}
    job = preference_job(folder, loss or SimPO(), data=data, seq_len=length)
    context = build_context(job, installed(), None)
    return job.data.sources[0].build(attrs.evolve(context, tokenizer=tokenizer or build_tokenizer(job, context)))


def learned(row: Any) -> dict[int, str]:
    """The text that each document of a row learns."""
    texts: dict[int, str] = {}
    for number in np.unique(row["document_ids"]):
        labels = row["labels"][row["document_ids"] == number]
        texts[int(number)] = bytes(int(i) for i in labels if 0 <= i < 256).decode()
    return texts


class TestPairs(DatasetSuite):
    job = {"data": {"tokenizer": Bytes()}, "loss": SimPO()}

    def make(self, folder):
        lines = [{"prompt": chr(97 + n), "chosen": chr(98 + n), "rejected": "z"} for n in range(24)]
        return Pairs(path=write_lines(folder / "a.jsonl", lines), held_out_every=4, row_examples=2)


class TestSingleAnswers(DatasetSuite):
    job = {"data": {"tokenizer": Bytes()}, "loss": KTO(reference="somewhere")}

    def make(self, folder):
        lines = [{"prompt": chr(97 + n), "completion": "z", "label": n % 2 == 0} for n in range(24)]
        return Pairs(path=write_lines(folder / "a.jsonl", lines), row_examples=2)


def test_a_row_has_as_many_pairs_as_fit_apart_from_each_other(tmp_path: Path) -> None:
    rows = build(tmp_path, pair_lines(30))
    assert len(rows) < 20
    row = max((rows[n] for n in range(len(rows))), key=lambda row: row["examples"])
    count = 2 * int(row["examples"])
    assert row[KINDS][0, :count].tolist() == [CHOSEN, REJECTED] * (count // 2)
    assert not row[KINDS][0, count:].any()
    starts = np.flatnonzero(np.diff(row["document_ids"], prepend=-1))
    assert (row["positions"][starts] == 0).all()
    assert row["document_ids"][starts][:count].tolist() == list(range(count))  # the answers of a pair side by side
    assert sum(int(rows[n]["examples"]) for n in range(len(rows))) == 30


def test_answers_are_learned_with_their_end_and_prompts_are_not(tmp_path: Path) -> None:
    rows = build(tmp_path, [{"prompt": "1? ", "chosen": "yes", "rejected": "no, 1"}])
    row = rows[0]
    assert learned(row) == {0: "yes", 1: "no, 1", 2 * 32: ""}
    assert bytes(row["input_ids"][:6].tolist()) == b"1? yes"
    assert (row["labels"] >= 0).sum() == len("yes") + len("no, 1") + 2
    assert rows.where(0).endswith("line 1")


def test_without_packing_a_row_has_one_pair(tmp_path: Path) -> None:
    rows = build(tmp_path, pair_lines(10), packed=False)
    assert len(rows) == 10
    assert rows[3][KINDS].shape == (1, 3)


def test_every_nth_line_is_held_out(tmp_path: Path) -> None:
    rows = build(tmp_path, pair_lines(20), held_out_every=5)
    assert rows.held_out is not None
    assert sorted(e.line for row in rows.held_out.rows for e in row) == [1, 6, 11, 16]
    assert sum(len(row) for row in rows.rows) == 16


LONG = {"prompt": "abcdefghij" * 4, "chosen": "yes", "rejected": "no"}


def test_what_is_too_long_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"line 2: .* take 87 tokens, and a row has 64; raise train.seq_len, or set too"):
        build(tmp_path, [pair_lines(1)[0], LONG])


def test_what_is_too_long_is_dropped_and_counted(tmp_path: Path) -> None:
    rows = build(tmp_path, [*pair_lines(3), LONG], too_long="drop")
    assert rows.counts == {"dropped": 1}
    assert rows.describe().endswith("too long: 1 dropped")


def test_prompts_lose_their_start_and_answers_nothing(tmp_path: Path) -> None:
    never = {"prompt": "q", "chosen": "y" * 40, "rejected": "n" * 40}
    rows = build(tmp_path, [*pair_lines(3), LONG, never], too_long="truncate")
    assert rows.counts == {"truncated": 1, "dropped": 1}
    [row] = [rows[n] for n, row in enumerate(rows.rows) if row[0].line == 4]
    assert learned(row)[0] == "yes"
    chosen, rejected = (row["input_ids"][row["document_ids"] == number] for number in (0, 1))
    assert bytes(chosen[:-1].tolist()) == (LONG["prompt"] + "yes")[-len(chosen) + 1 :].encode()
    assert chosen[:20].tolist() == rejected[:20].tolist()  # the same prompt before both


def test_single_answers_come_with_mismatched_ones(tmp_path: Path) -> None:
    rows = build(tmp_path, single_lines(9), KTO(reference="x"))
    assert sorted({int(k) for n in range(len(rows)) for k in rows[n][KINDS].flat}) == [REJECTED, 0, CHOSEN]
    first = next(e for row in rows.rows for e in row if e.line == 1)
    assert first.mismatched is not None
    assert bytes(first.mismatched.ids[:-1].tolist()) == b"0? " + b"yesyes"  # the prompt of line 1, the answer of line 2
    assert rows[0][MISMATCHED].shape == (4, LENGTH)
    assert MISMATCHED not in build(tmp_path, single_lines(9), KTO(reference="x", estimate_z=False))[0]


def test_pairs_become_single_answers(tmp_path: Path) -> None:
    rows = build(tmp_path, pair_lines(4), KTO(reference="x"), unpair=True)
    examples = [example for row in rows.rows for example in row]
    assert sorted((e.line, e.desirable) for e in examples) == [(n, (d,)) for n in range(1, 5) for d in (False, True)]


def test_log_probabilities_of_the_data_stand_by_their_answers(tmp_path: Path) -> None:
    lines = pair_lines(3)
    for number, line in enumerate(lines):
        line |= {"reference_chosen": -1.0 - number, "reference_rejected": -9.0 - number}
    row = build(tmp_path, lines, DPO())[0]
    first = [(-1.0 - n, -9.0 - n) for n in range(3)]
    stored = row[REFERENCE][0, : 2 * int(row["examples"])].reshape(-1, 2)
    assert {tuple(pair) for pair in stored.tolist()} <= set(first)


# --- chats -----------------------------------------------------------------------------------------------------------


class Chats:
    """A tokenizer of bytes whose template writes `<role>content|`; the answer and its `|` are learned."""

    vocab_size, end_of_text = 258, 256

    def encode_batch(self, texts):
        return [list(text.encode()) for text in texts]

    def check_chat(self):
        pass

    def chat_prompt(self, messages, tools=None):
        return [*self._ids(messages), *b"<assistant>"]

    def _ids(self, messages):
        return [byte for m in messages for byte in f"<{m['role']}>{m['content']}|".encode()]

    def chat(self, messages, tools=None):
        ids, mask = [], []
        for message in messages:
            head, body = f"<{message['role']}>".encode(), f"{message['content']}|".encode()
            ids += [*head, *body]
            mask += [False] * len(head) + [message["role"] == "assistant"] * len(body)
        return SimpleNamespace(ids=np.array(ids), learned=np.array(mask))


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


QUESTION = [say("user", "hi"), say("assistant", "hello"), say("user", "ok?")]
CHATS = [
    {"prompt": QUESTION, "chosen": [say("assistant", "yes")], "rejected": [say("assistant", "no")]},
    {"prompt": QUESTION, "chosen": "yes", "rejected": "no"},
    {"chosen": [*QUESTION, say("assistant", "yes")], "rejected": [*QUESTION, say("assistant", "no")]},
]


@pytest.mark.parametrize("line", CHATS)
def test_of_a_chat_the_last_answers_alone_are_learned(tmp_path: Path, line: Any) -> None:
    row = build(tmp_path, [line], tokenizer=Chats(), seq_len=128)[0]
    assert learned(row) == {0: "yes|", 1: "no|", 64: ""}
    document = row["input_ids"][row["document_ids"] == 1]
    assert bytes(document.tolist()) == b"<user>hi|<assistant>hello|<user>ok?|<assistant>no|"


def test_chats_need_a_tokenizer_with_a_template(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match=r'chat messages, which need a chat template; set \[data.tokenizer\] type = "auto"'
    ):
        build(tmp_path, CHATS[:1])


# --- malformed lines -------------------------------------------------------------------------------------------------

GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}
MALFORMED = {
    "{": "is not JSON",
    "[1]": "holds list",
    json.dumps({"prompt": "a"}): "has 'prompt'; a line has",
    json.dumps({**GOOD, "completion": "d", "label": True}): "not both",
    json.dumps({**GOOD, "chosen": ""}): "'chosen' is empty",
    json.dumps({**GOOD, "rejected": 3}): "'rejected' is 3; it is a text or a list of chat messages",
    json.dumps({"chosen": "b", "rejected": "c"}): "has no 'prompt'",
    json.dumps({**GOOD, "chosen": [{"role": "assistant"}]}): "message 0 of 'chosen' has 'role'",
    json.dumps({**GOOD, "chosen": [say("assistant", "b")]}): "the prompt is a text",
    json.dumps({"prompt": "a", "completion": "b", "label": "good"}): "'label' is \"good\"; it is true",
    json.dumps({"chosen": [say("user", "a"), say("assistant", "b")], "rejected": [say("user", "c")]}): "begin alike",
}


@pytest.mark.parametrize("line", MALFORMED)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(JobError) as error:
        build(tmp_path, [GOOD, "", line])
    assert "lines.jsonl, line 3: " in str(error.value)
    assert MALFORMED[line] in str(error.value)


def test_all_malformed_lines_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(JobError) as error:
        build(tmp_path, [GOOD, *["{"] * 25])
    assert [f"line {n}:" in str(error.value) for n in (2, 21, 22)] == [True, True, False]
    assert "and 5 more malformed lines" in str(error.value)


def test_lines_of_two_forms_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="line 2 has 1 and line 1 has 2; split the file"):
        build(tmp_path, [GOOD, {"prompt": "a", "completion": "b", "label": True}])


@pytest.mark.parametrize("value", [None, "x", 0.5, float("nan"), True])
def test_log_probabilities_must_be_some(tmp_path: Path, value: Any) -> None:
    line = GOOD | {"reference_chosen": -1.0, "reference_rejected": value}
    with pytest.raises(JobError, match=r"line 1: 'reference_rejected' is .*without loss.reference"):
        build(tmp_path, [line], DPO())


# --- what a check of the job refuses ---------------------------------------------------------------------------------


def problems(folder: Path, lines: list[Any], loss: Any, **keys: Any) -> str:
    path = write_lines(folder / "lines.jsonl", lines)
    data = {"tokenizer": keys.pop("tokenizer", Bytes()), "sources": (Pairs(path=path, **keys),)}
    return "\n".join(job_problems(preference_job(folder, loss, data=data, evaluations={})))


def test_jobs_that_cannot_work_are_refused_by_name(tmp_path: Path) -> None:
    pairs, single = pair_lines(2), single_lines(2)
    stored = [line | {"reference_chosen": -1.0, "reference_rejected": -2.0} for line in pairs]
    assert problems(tmp_path, pairs, SimPO()) == ""
    assert problems(tmp_path, stored, DPO()) == ""
    assert "data.sources.0: answers are texts" in problems(tmp_path, pairs, SimPO(), tokenizer=None)
    assert "CrossEntropy, which would learn rejected answers" in problems(tmp_path, pairs, CrossEntropy())
    assert "data.sources.0.path" in problems(tmp_path, single, SimPO())
    assert 'take [loss] type = "kto"' in problems(tmp_path, single, SimPO())
    assert "set unpair = true" in problems(tmp_path, pairs, KTO(reference=str(tmp_path)))
    assert "data.sources.0.unpair" in problems(tmp_path, pairs, SimPO(), unpair=True)
    assert "'reference_chosen' is missing" in problems(tmp_path, pairs, DPO())
    assert "data.sources.0.too_long" in problems(tmp_path, stored, DPO(), too_long="truncate")
    assert "loss.reference: nowhere does not exist" in problems(tmp_path, pairs, DPO(reference="nowhere"))
    assert "loss.estimate_z" in problems(tmp_path, single, KTO())
    assert 'set [data.tokenizer] type = "auto"' in problems(tmp_path, CHATS, SimPO())


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_chat_template_of_transformers_writes_the_pairs(tmp_path: Path) -> None:
    characters = [AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    tokenizer = Tokenizer(models.BPE({bytes_: n for n, bytes_ in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.add_special_tokens(characters)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", chat_template=TEMPLATE)
    fast.save_pretrained(str(tmp_path / "tokenizer"))
    auto = Auto(path=str(tmp_path / "tokenizer"))
    assert problems(tmp_path, CHATS[:1], SimPO(), tokenizer=auto) == ""
    loaded = auto.build(None, lambda: ())  # type: ignore[arg-type]
    rows = [build(tmp_path, [line], tokenizer=loaded, seq_len=256)[0] for line in CHATS]
    for row in rows:
        labels = [row["labels"][row["document_ids"] == number] for number in (0, 1)]
        texts = [fast.decode(part[part >= 0]) for part in labels]
        assert texts == ["yes<|im_end|>", "no<|im_end|>"]
