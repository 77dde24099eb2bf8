"""`forge-run generate`: how prompts begin, where answers end, and chats, from the command line."""

from __future__ import annotations

import io
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from forge_core.cli import main
from forge_plugin_generate.command import load_model_and_tokenizer
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_generate.prompts import chat_ids, prompt_ids, stop_ids
from forge_plugin_generate.stops import Stops
from forge_plugin_generate.terminal import Conversation
from forge_plugin_text.bytes import ByteTokenizer
from forge_testing.refusals import lacks, refuses

SPECIAL = ["<|endoftext|>", "<|begin|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|' + message.role + '|>' + message.content }}{% if message.role == 'assistant' %}{{- '<|end|>' }}{% endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
JOB = """
[model]
type = "transformer"
dim = 32
layers = 1
attention = { type = "gqa", heads = 2 }

[train]
steps = 30
global_batch_size = 4
seq_len = 24
deterministic = false

[optimizer]
type = "adamw"
lr = 1e-2

[data.tokenizer]
type = "auto"
path = "tokenizer"
begin_of_text = "auto"

[[data.sources]]
type = "huggingface"
path = "chats"
messages = "messages"

[checkpoint]
interval = 30
"""
GREEDY = ["--temperature", "0", "--device", "cpu"]


def save_tokenizer(template: str | None) -> None:
    """Saves a tokenizer of bytes whose files put `<|begin|>` before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    begin = inner.token_to_id("<|begin|>")
    inner.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    tokens = {"eos_token": "<|endoftext|>", "bos_token": "<|begin|>", "additional_special_tokens": SPECIAL[2:]}
    PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **tokens).save_pretrained("tokenizer")


def train(job: str, name: str = "run") -> Path:
    Path("job.toml").write_text(f'[job]\nname = "{name}"\noutput = "runs"\n{job}')
    assert main(["run", "job.toml"]) == 0
    return Path("runs", name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a tiny run that has learned one chat."""
    folder = tmp_path_factory.mktemp("chat")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FORGE_CACHE", str(folder / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        save_tokenizer(TEMPLATE)
        Path("chats").mkdir()
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello you"}]
        Path("chats", "train.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 40)
        train(JOB)
    return folder


@pytest.fixture
def run(runs, monkeypatch, capsys) -> Path:
    monkeypatch.chdir(runs)
    monkeypatch.setenv("FORGE_CACHE", str(runs / "cache"))
    capsys.readouterr()
    return Path("runs", "run")


def written(run: Path, ids: list[int], count: int, temperature: float = 0, **keys) -> str:
    """What the model writes after a prompt of these ids."""
    model, tokenizer = load_model_and_tokenizer(run, "cpu")
    stop = stop_ids(tokenizer)
    [row] = generate(model, [ids], count, stop[0], Sampling(temperature=temperature), stop=stop, **keys)
    return tokenizer.decode(row)


# --- chats ---------------------------------------------------------------------------------------------------------


def test_a_message_is_answered_by_the_template_until_the_turn_ends(run, capsys) -> None:
    assert main(["generate", str(run), "--chat", "--prompt", "hi", *GREEDY]) == 0
    assert capsys.readouterr().out == "hello you\n"
    prompt = AutoTokenizer.from_pretrained("tokenizer").apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    model, tokenizer = load_model_and_tokenizer(run, "cpu")
    assert chat_ids(tokenizer, [{"role": "user", "content": "hi"}]) == prompt
    # The end of the turn was learned, and is where it stops: it is not the end of the text.
    [row] = generate(model, [prompt], 30, tokenizer.end_of_text, Sampling(temperature=0))
    assert row == [*tokenizer.encode("hello you"), tokenizer.token_id("<|end|>")]


def test_an_answer_can_be_streamed(run, capsys, monkeypatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("forge_plugin_generate.terminal.write", pieces.append)
    assert main(["generate", str(run), "--chat", "--prompt", "hi", "--stream", *GREEDY]) == 0
    assert "".join(pieces) == "hello you"
    assert len(pieces) > 1
    assert capsys.readouterr().out == "\n"


def test_lines_of_standard_input_are_one_conversation(run, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\n  \nhi\n"))
    assert main(["generate", str(run), "--chat", "--system", "be kind", "--max-tokens", "12", *GREEDY]) == 0
    tokenizer = load_model_and_tokenizer(run, "cpu")[1]
    messages = [{"role": "system", "content": "be kind"}]
    answers = []
    for _ in range(2):
        messages.append({"role": "user", "content": "hi"})
        answers.append(written(run, chat_ids(tokenizer, messages), 12))
        messages.append({"role": "assistant", "content": answers[-1]})
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)


def test_chat_is_the_same_conversation_and_its_commands_begin_others(run, capsys, monkeypatch) -> None:
    def talked(lines: str, *options: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        assert main(["chat", str(run), "--device", "cpu", "--max-tokens", "12", *options]) == 0
        return capsys.readouterr().out

    drawn = ("--temperature", "6", "--top-p", "1")
    greedy = ("--temperature", "0")
    assert talked("hi\n", *greedy) == "hello you\n"
    alone, kind = talked("hi\n", *drawn), talked("hi\n", *drawn, "--system", "be kind")
    assert talked("hi\n/reset\nhi\n", *drawn) == alone * 2
    assert talked("hi\n/system be kind\nhi\n", *drawn) == alone + kind
    assert talked("hi\n/retry\n", *drawn) == alone + talked("hi\n", *drawn, "--seed", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO("/retry\n"))
    assert main(["chat", str(run), "--device", "cpu"]) == 1
    assert not lacks(capsys.readouterr().err, "/retry")


def test_an_answer_that_is_interrupted_stays_as_far_as_it_came(run) -> None:
    from forge_plugin_generate.chat import Chat

    tokenizer = load_model_and_tokenizer(run, "cpu")[1]
    asked: list[list[int]] = []

    def interrupted(prompts, until):
        asked.append(prompts[0])
        until(tokenizer.encode("hello"))
        raise KeyboardInterrupt

    chat = Chat(Stops.of(tokenizer), interrupted, Namespace(system="", seed=0, max_tokens=9), 24)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            chat.answer("hi")
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert chat.messages == turn * 2
    assert asked[1] == chat_ids(tokenizer, [*turn, turn[0]])


def test_ctrl_c_before_a_line_of_a_file_ends_the_command(monkeypatch) -> None:
    """On a terminal it empties the line that is typed; there is none here, and the command must not read on."""
    events: list[str | type[BaseException]] = ["first", KeyboardInterrupt, EOFError]

    def interrupted(mark):
        if isinstance(event := events.pop(0), str):
            return event
        raise event

    answered: list[str] = []
    monkeypatch.setattr("builtins.input", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        Conversation(Namespace(), answered.append, {}).run()
    assert answered == ["first"]


def test_several_prompts_are_answered_apart(run, capsys) -> None:
    assert main(["generate", str(run), "--chat", "--prompt", "hi", "--prompt", "hi", *GREEDY]) == 0
    assert capsys.readouterr().out == f"hello you\n{'-' * 40}\n" * 2


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["--system", "x"], ["--system", "--chat"]),
        (["--chat", "--no-bos"], ["--no-bos", "template"]),
        (["--chat", "--image", "a.png"], ["--chat", "--image"]),
        (["--chat", "--video", "a.mp4"], ["--chat", "--video"]),
        (["--json", "--interactive"], ["--json", "--interactive", "--prompt"]),
        (["--json", "--chat"], ["--json", "--chat without --prompt"]),
        (["--json", "--stream"], ["--json", "--stream"]),
    ],
)
def test_options_that_do_not_go_together_are_refused(run, capsys, options, facts) -> None:
    with pytest.raises(SystemExit) as end:
        main(["generate", str(run), *options])
    assert end.value.code == 2
    assert not lacks(capsys.readouterr().err.splitlines()[-1], *facts)


def test_a_run_whose_tokenizer_writes_no_chats_is_refused_with_the_fix(run, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("hello " * 40)
    text = '[[data.sources]]\ntype = "text"\npath = "text.txt"\nheld_out_every = 0\n'
    head, _, rest = JOB.partition("[data.tokenizer]")
    head, checkpoint = head.replace("steps = 30", "steps = 1"), "[checkpoint]" + rest.partition("[checkpoint]")[2]
    save_tokenizer(None)
    auto = '[data.tokenizer]\ntype = "auto"\npath = "tokenizer"\n'
    for name, tokenizer in (("bytes", '[data.tokenizer]\ntype = "bytes"\n'), ("auto", auto)):
        folder = train(head + tokenizer + text + checkpoint, name)
        capsys.readouterr()
        assert main(["generate", str(folder), "--chat", "--prompt", "hi", "--device", "cpu"]) == 2
        assert "chat_template" in capsys.readouterr().err


def test_json_has_each_prompt_and_what_the_model_writes(run, capsys) -> None:
    tokenizer = load_model_and_tokenizer(run, "cpu")[1]
    for options in (["--chat"], ["--temperature", "6", "--top-p", "1", "--max-tokens", "8"]):
        words = ["generate", str(run), "--prompt", "hi", "--prompt", "hi", *GREEDY, *options]
        assert main(words) == 0
        shown = capsys.readouterr().out.split(f"{'-' * 40}\n")[:2]
        assert main([*words, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["run"] == str(run)
        assert facts["checkpoint"] == str(run / "checkpoints" / f"step-{facts['step']}")
        head = "" if "--chat" in options else "hi"
        assert [f"{head}{each['text']}\n" for each in facts["texts"]] == shown
        for each in facts["texts"]:
            assert each["prompt"] == "hi"
            assert tokenizer.decode(each["ids"]) == each["text"]


# --- how prompts begin, where answers end ----------------------------------------------------------------------------


def test_a_prompt_begins_with_the_beginning_of_text_unless_told_otherwise(run, capsys) -> None:
    tokenizer = AutoTokenizer.from_pretrained("tokenizer")
    shown, drawn = [], ["--temperature", "4", "--top-p", "1", "--seed", "3", "--max-tokens", "8", "--device", "cpu"]
    for options, special in (([], True), (["--no-bos"], False)):
        assert main(["generate", str(run), "--prompt", "h", *options, *drawn]) == 0
        shown.append(capsys.readouterr().out)
        ids = tokenizer("h", add_special_tokens=special)["input_ids"]
        assert shown[-1] == f"h{written(run, ids, 8, temperature=4, seed=3)}\n"
    assert shown[0] != shown[1]


def test_a_further_token_ends_an_answer(run, capsys) -> None:
    for token, said in ((" ", "hello"), ("l", "he"), ("lo", "hel")):
        assert main(["generate", str(run), "--chat", "--prompt", "hi", "--stop", token, *GREEDY]) == 0
        assert capsys.readouterr().out == f"{said}\n"
    assert main(["generate", str(run), "--stop", "<|user|>", "--stop", ""]) == 2
    assert not lacks(capsys.readouterr().err, "stop", "empty")


def test_ids_of_an_answer_hold_the_text_that_has_ended_it(run, capsys) -> None:
    assert main(["generate", str(run), "--chat", "--prompt", "hi", "--stop", "lo", "--json", *GREEDY]) == 0
    [answer] = json.loads(capsys.readouterr().out)["texts"]
    assert answer["text"] == "hel"
    assert load_model_and_tokenizer(run, "cpu")[1].decode(answer["ids"]) == "hello"


def test_ids_of_prompts_and_stops_of_a_tokenizer_that_knows_neither() -> None:
    tokenizer = ByteTokenizer()
    assert prompt_ids(tokenizer, "ab") == [*b"ab"]
    assert prompt_ids(tokenizer, "") == [256]
    assert stop_ids(tokenizer) == [256]
    assert Stops.of(tokenizer, [".", "ab"]) == Stops(tokenizer, [256], (".", "ab"))
    tokenizer.begin_of_text = [9]
    assert prompt_ids(tokenizer, "") == [9]
    assert prompt_ids(tokenizer, "", bos=False) == [256]
    with refuses("", '"auto"', "chat_template"):
        chat_ids(tokenizer, [])


def test_weights_that_were_trained_with_another_beginning_are_taken_with_a_warning(run, capsys) -> None:
    weights = f'{JOB}load = {{ path = "{run}" }}\n'.replace("steps = 30", "steps = 1")
    warning = "they were trained with another tokenizer: token ids mean other texts now"
    train(weights, "same")
    assert warning not in capsys.readouterr().out
    train(weights.replace('begin_of_text = "auto"\n', ""), "other")
    assert warning in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "bounds"),
    [
        ("--temperature", "-1", [0]),
        ("--temperature", "nan", [0]),
        ("--temperature", "inf", [0]),
        ("--top-k", "-3", [0]),
        ("--top-p", "7", [0, 1]),
        ("--top-p", "0", [0, 1]),
    ],
)
def test_wrong_numbers_are_refused_before_the_run_is_looked_for(option, value, bounds, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "no-run", option, value])
    assert not lacks(capsys.readouterr().err.splitlines()[-1], option, value, *bounds)
