"""What `forge-run data` prints: marks and colours, any width, and data that would disturb a terminal."""

from __future__ import annotations

import pytest
from rich.console import Console

from forge_plugin_plan.data_view import screen
from forge_plugin_plan.data_view.screen import visible
from forge_testing.refusals import lacks

BEST_FIT = '[data.packing]\ntype = "forge-plugin-text/best_fit"\n'


def test_without_colour_brackets_enclose_what_is_not_learned(write_job, data) -> None:
    pytest.importorskip("forge_plugin_text.packing")
    code, out, _ = data(write_job("Chats", BEST_FIT, seq_len=20))
    assert code == 0
    assert "\x1b" not in out
    assert "⟪<|user|>ASK A" in out
    assert "<|answer|>⟫SAY B" in out
    assert "padding ──" in out
    assert "not learned" in out


def test_on_a_terminal_colours_tell_it_and_no_color_turns_them_off(write_job, data, monkeypatch) -> None:
    job = write_job("Chats", seq_len=8)
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = data(job)[1]
    assert "\x1b[32m" in coloured
    assert "⟪" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    plain = data(job)[1]
    assert "\x1b[32m" not in plain
    assert "⟪" in plain


@pytest.mark.parametrize("width", [60, 40])
def test_no_line_is_wider_than_the_terminal(width, write_job, data, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = data(write_job("Chats", seq_len=8), "--step=2", "--sample=1")[1]
    assert max(map(len, out.splitlines())) <= width


def test_tokens_beyond_the_limit_are_counted(write_job, data, as_json) -> None:
    job = write_job("Talk", seq_len=12)
    [sample] = as_json(job, "--tokens=5")["samples"]
    assert sum(run["positions"] for run in sample["runs"]) == 5
    assert sample["left_out"] == 8  # 12 inputs and the last label
    assert not lacks(data(job, "--tokens=5")[1], "8 more tokens", "8 of them", "--tokens 0")
    assert as_json(job, "--tokens=0")["samples"][0]["left_out"] == 0


def test_escape_sequences_in_the_data_are_spelt_out() -> None:
    assert visible("a\x1b[31m\tb\nc\r") == "a\\x1b[31m\tb\nc\\r"
    console = Console(width=40, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(screen.Text(visible("\x1b]0;title\x07")))
    assert "\x1b" not in capture.get()
