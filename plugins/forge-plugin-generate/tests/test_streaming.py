"""Text as it is made: `--stream`, `--interactive` and `forge-run chat`, from pipes and on a terminal."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.cli import main
from forge_core.contracts.errors import ExitCode
from forge_plugin_generate.stops import Stops
from forge_plugin_generate.streaming import UNREADABLE, TextStream
from forge_plugin_text.bytes import ByteTokenizer
from forge_testing.processes import HANG_S
from forge_testing.refusals import lacks
from forge_testing.tiny import TINY_JOB

JOB = """
[train]
steps = 2
global_batch_size = 4
seq_len = 16
[model]
type = "transformer"
dim = 16
layers = 1
attention = { type = "gqa", heads = 2 }
[optimizer]
type = "adamw"
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "text"
path = "text.txt"
held_out_every = 0
"""
DRAWN = ["--max-tokens", "24", "--temperature", "1.5", "--top-p", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FORGE_CACHE", str(folder / "cache"))
        Path("text.txt").write_text("Grüße an alle! " * 40)
        Path("job.toml").write_text(JOB)
        assert main(["run", "job.toml"]) == 0
    return folder


@pytest.fixture
def forge(folder, monkeypatch, capfd):
    """Run a command line in this process: exit code, output, errors."""
    monkeypatch.chdir(folder)
    capfd.readouterr()

    def run(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            code = main(list(argv))
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capfd.readouterr())

    return run


# --- pieces ----------------------------------------------------------------------------------------------------------


def pieces_of(ids: list[int]) -> list[str]:
    pieces: list[str] = []
    stream = TextStream(Stops.of(ByteTokenizer()), pieces.append)
    for end in range(1, len(ids) + 1):
        assert not stream.show(ids[:end])
    stream.finish(ids)
    return pieces


@given(st.text())
def test_characters_appear_when_they_are_whole(text: str) -> None:
    pieces = pieces_of([*text.encode()])
    assert "".join(pieces) == text
    assert all(len(piece) == 1 for piece in pieces if UNREADABLE not in text)


@given(st.lists(st.integers(0, 256)))
def test_pieces_of_any_bytes_are_the_text_that_is_decoded_at_once(ids: list[int]) -> None:
    assert "".join(pieces_of(ids)) == ByteTokenizer().decode(ids)


def test_a_decoder_that_changes_what_it_wrote_has_the_whole_text_at_the_end() -> None:
    class Rewrites(ByteTokenizer):
        def decode(self, ids):
            return super().decode(ids).replace(" .", ".")

    pieces: list[str] = []
    stream = TextStream(Stops.of(Rewrites()), pieces.append)
    for end in range(1, 4):
        stream.show([*b"a ."[:end]])
    stream.finish([*b"a ."])
    assert "".join(pieces) == "a \na."


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_ends_the_text_before_it_and_no_part_of_it_is_shown(text: str, ends: list[str]) -> None:
    stops = Stops(ByteTokenizer(), [256], tuple(ends))
    pieces: list[str] = []
    stream, ids = TextStream(stops, pieces.append), [*text.encode()]
    end = next((end for end in range(1, len(ids) + 1) if stream.show(ids[:end])), len(ids))
    whole = next((text[:end] for end in range(len(text) + 1) if any(stop in text[:end] for stop in ends)), text)
    assert text[:end] == whole
    before = "".join(pieces)
    stream.finish(ids[:end])
    assert stream.text == stops.decode(ids[:end])
    assert stream.text.startswith(before), "nothing that was shown is taken back"
    assert not any(stop in stream.text for stop in ends)


def test_a_token_costs_the_same_however_long_the_text_is() -> None:
    decoded: list[int] = []

    class Counts(ByteTokenizer):
        def decode(self, ids):
            decoded.append(len(ids))
            return super().decode(ids)

    text = "Grüße, 世界! " * 40
    stream = TextStream(Stops.of(Counts()), lambda piece: None)
    ids = [*text.encode()]
    for end in range(1, len(ids) + 1):
        stream.show(ids[:end])
    assert stream.text == text
    assert max(decoded) <= 6  # a character of three bytes after another


# --- generate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_stream_is_the_text_of_the_same_seed(forge, seed) -> None:
    arguments = ["generate", "runs/run", "--prompt", "Gr", *DRAWN, "--seed", seed]
    code, whole, _ = forge(*arguments)
    assert code == 0
    assert whole.startswith("Gr")
    assert forge(*arguments, "--stream")[:2] == (0, whole)


def test_lines_of_standard_input_are_continued_each_by_itself(forge) -> None:
    texts = [forge("generate", "runs/run", "--prompt", prompt, *DRAWN)[1] for prompt in ("an", "al")]
    assert forge("generate", "runs/run", "--interactive", *DRAWN, stdin="an\n\nal\n")[:2] == (0, "".join(texts))


def test_commands_change_the_settings_of_what_follows(forge) -> None:
    other = forge("generate", "runs/run", "--prompt", "an", *DRAWN, "--seed", "7")[1]
    code, out, _ = forge("generate", "runs/run", "--interactive", *DRAWN, stdin="/seed 7\nan\n/top-p\n")
    assert (code, out) == (0, f"seed 7\n{other}top-p 1.0\n")
    _, out, _ = forge("generate", "runs/run", "--interactive", *DRAWN, stdin="/help\n/exit\nan\n")
    assert {"/help", "/temperature", "/max-tokens", "/exit"} <= {line.split()[0] for line in out.splitlines()}
    assert "/system" not in out


def test_a_line_with_two_slashes_is_a_text_that_begins_with_one(forge) -> None:
    text = forge("generate", "runs/run", "--prompt", "/seed 7", *DRAWN)[1]
    assert forge("generate", "runs/run", "--interactive", *DRAWN, stdin="//seed 7\n")[:2] == (0, text)


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("/temprature 1", ["/temprature", "'temperature'"]),
        ("/temperature -1", ["/temperature -1", 0]),
        ("/max-tokens 0", ["/max-tokens 0", 1]),
    ],
)
def test_a_wrong_command_in_a_pipe_ends_it(forge, line, facts) -> None:
    code, out, err = forge("generate", "runs/run", "--interactive", stdin=f"{line}\nan\n")
    assert (code, out, err.count("\n"), lacks(err, *facts)) == (ExitCode.FAILED, "", 1, [])


# --- what is refused before anything is loaded -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["gone"], ["gone"]),
        (["."], [". ", "run folder"]),
        (["runs/run", "--device", "cuda"], ["--device", '"cuda"', "cpu"]),
        (["runs/run", "--max-tokens", "-1"], ["--max-tokens", 1]),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_wrong_arguments_are_one_line_and_exit_code_2(forge, monkeypatch, command, arguments, facts) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = forge(command, *arguments)
    assert (code, out) == (ExitCode.BAD_JOB, "")
    assert not lacks(err.splitlines()[-1], *facts)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["--stream", "--prompt", "a", "--prompt", "b"], ["one --prompt"]),
        (["--interactive", "--prompt", "a"], ["--interactive", "prompts"]),
    ],
)
def test_options_that_contradict_each_other_are_refused(forge, arguments, facts) -> None:
    code, _, err = forge("generate", "runs/run", *arguments)
    assert code == ExitCode.BAD_JOB
    assert not lacks(err, *facts)


def test_a_chat_without_a_template_offers_what_works_before_the_model_is_loaded(forge, monkeypatch) -> None:
    monkeypatch.setattr("forge_kit.tools.trained_model.load_weights", None)  # would fail
    code, _, err = forge("chat", "runs/run")
    assert code == ExitCode.BAD_JOB
    assert not lacks(err, "tokenizer", "forge-run generate runs/run --interactive")


def test_a_run_without_a_tokenizer_says_so(forge) -> None:
    Path("numbers.toml").write_text(f'[job]\nname = "numbers"\n{TINY_JOB}')
    assert main(["run", "numbers.toml"]) == 0
    code, _, err = forge("generate", "runs/numbers")
    assert code == ExitCode.FAILED
    assert not lacks(err, "tokenizer")


# --- on a terminal ---------------------------------------------------------------------------------------------------


class Terminal:
    """`forge-run` on a terminal, in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.shown = ""
        self.process, self._terminal = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            environment = os.environ | {"TERM": "dumb", "HOME": str(folder), "FORGE_CACHE": str(folder / "cache")}
            environment.pop("XDG_STATE_HOME", None)
            os.execve(sys.executable, [sys.executable, "-m", "forge_core", *arguments], environment)

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def wait_for(self, expected: str, end: str = "\r\n> ") -> str:
        """Wait until this is shown, and then `end`; returns what was shown since the last call."""
        deadline, new = time.monotonic() + HANG_S, ""
        while not (expected in new and new.endswith(end)):
            assert time.monotonic() < deadline, f"{expected!r} is not in {new!r}"
            if select.select([self._terminal], [], [], 1.0)[0]:
                new += self._read()
        return new

    def leave(self) -> int:
        """Type Ctrl-D until the process has ended, since one that arrives between two prompts is lost.

        Returns:
            Its exit code.
        """
        deadline = time.monotonic() + HANG_S
        while not self._ends_within(2.0):
            assert time.monotonic() < deadline, "Ctrl-D does not end it"
            self.type("\x04")
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], left)[0]:
                try:
                    if not self._read():
                        return True
                except OSError:  # the other side is closed
                    return True
        return False

    def _read(self) -> str:
        text = os.read(self._terminal, 4096).decode(errors="replace")
        self.shown += text
        return text


@pytest.mark.slow
def test_on_a_terminal_ctrl_c_ends_a_text_and_ctrl_d_leaves(folder) -> None:
    terminal = Terminal(folder, "generate", "runs/run", "--interactive", "--max-tokens", "100000", "--device", "cpu")
    terminal.wait_for("Ctrl-D leaves")
    terminal.type("an alle\n")
    terminal.wait_for("an alle\r\nan alle", end="")
    terminal.type("\x03")
    terminal.wait_for("^C")
    terminal.type("/temperature -1\n")
    terminal.wait_for("must be at least 0, got -1")
    # Python may keep a Ctrl-C that arrives between readline's prompt and its wait for a key until the next key
    terminal.type("\x03")
    time.sleep(1.0)
    terminal.type("\n")
    terminal.wait_for("Ctrl-D leaves")
    assert terminal.leave() == 0, terminal.shown
    assert "an alle" in (folder / ".local/state/forge-run/chat_history").read_text()
