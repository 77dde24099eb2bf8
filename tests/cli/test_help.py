"""Every command's help has one form: a summary, options with help, and examples that its own parser takes."""

from __future__ import annotations

import argparse
import shlex

import pytest
from parsers import OFFERS, parsed, parsers

from forge_core.cli import HEADINGS, command_summary, main
from forge_core.plugins.catalog import Offer

WITHOUT_JSON = {
    "run": "trains: its figures are in metrics.jsonl",
    "resume": "as run",
    "launch local": "as run",
    "launch elastic": "as run",
    "launch lighthouse": "a service",
    "watch": "a screen; show --json has its facts",
    "ladder": "run trains, and report writes: plan, fit and predict have --json",
    "data mix": "run trains, and write writes: plan and fit have --json",
    "chat": "a conversation; generate --chat --json has its answers",
    "completion": "a script of the shell",
    "explain schema": "prints JSON anyway",
    "new-plugin": "writes a package, and what to do next",
}
"""Commands that print no facts, and why."""
PLACES = {"--out": {"DIR", "FOLDER", "FILE", "PATH", "RUN"}, "--json": {None}, "--device": {"NAME"}}


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: offer.type)
class TestEachCommand:
    def test_its_summary_is_a_short_sentence(self, offer: Offer) -> None:
        heading, summary, _ = command_summary(offer.value)
        assert heading in HEADINGS
        assert summary[0].isupper()
        assert summary.endswith((".", "`."))
        assert len(summary) <= 80 - 16, "one line of a narrow terminal"

    def test_its_options_have_help_and_names_of_one_style(self, offer: Offer) -> None:
        for parser in parsers(parsed(offer, []).parser):
            for action in parser._actions:
                assert action.help, action
                takes_value = action.option_strings and action.nargs != 0 and not action.choices
                if takes_value and not isinstance(action, argparse.BooleanOptionalAction):
                    assert action.metavar, f"{action.option_strings}: a metavar, else it is the option once more"
                if isinstance(action.metavar, str) and "|" not in action.metavar:
                    assert action.metavar.partition(".")[0].partition("=")[0].isupper(), action.metavar
                for option in set(action.option_strings) & set(PLACES):
                    assert action.metavar in PLACES[option]

    def test_its_facts_are_printed_as_json_too(self, offer: Offer) -> None:
        """Each action of a command with several, but not the command alone, which only lists them."""
        every = list(parsers(parsed(offer, []).parser))
        missing = [each.prog for each in every[len(every) > 1 :] if "--json" not in each._option_string_actions]
        assert bool(missing) == (offer.type in WITHOUT_JSON), missing

    def test_its_errors_name_no_private_function(self, offer: Offer) -> None:
        """argparse names the function that refuses a value."""
        for parser in parsers(parsed(offer, []).parser):
            for action in parser._actions:
                assert not getattr(action.type, "__name__", "").startswith("_"), action.option_strings

    def test_an_option_has_no_abbreviations(self, offer: Offer) -> None:
        """They would change their meaning with a new option, and take overrides of the job for options."""
        assert not [parser.prog for parser in parsers(parsed(offer, []).parser) if parser.allow_abbrev]

    def test_numbers_that_are_defaults_are_in_the_help(self, offer: Offer) -> None:
        for parser in parsers(parsed(offer, []).parser):
            for action in parser._actions:
                if action.default and type(action.default) in (int, float):
                    number = action.default
                    forms = [f"({number:g}", f"({number}", f"({number / 10**6:g}M"]
                    assert any(form in action.help for form in forms), f"{action.option_strings}: {number}"

    def test_its_help_ends_with_examples_that_it_understands(
        self, offer: Offer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        with pytest.raises(SystemExit) as end:
            main([*offer.type.split(), "--help"])
        assert end.value.code == 0
        text, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
        assert examples, "no examples"
        assert max(map(len, text.partition("\n\n")[2].splitlines())) <= 60
        lines = [line.strip() for line in examples.splitlines()]
        assert any(f"forge-run {offer.type}" in line or offer.type in ("run",) for line in lines)
        for line in lines:
            words = shlex.split(line.partition("forge-run ")[2].partition(" > ")[0].partition(" | ")[0].rstrip(")"))
            name = offer.type.split()
            made = parsed(offer, words[len(name) :] if words[: len(name)] == name else words)
            made.parser.parse_args(made.argv)


def test_the_list_of_commands_is_one_screen_and_says_what_each_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "(from forge-plugin" in line or line == "more:"]
    listed: dict[str, str] = {}
    for line in (line for line in lines if line.startswith("  ")):
        # The names of a large group go on in a second line, below the summaries
        name = [*listed][-1] if line.startswith(" " * 16) else line.split()[0]
        listed[name] = f"{listed.get(name, '')} {line.strip()}"
    for offer in OFFERS:
        first, _, member = offer.type.partition(" ")
        assert member in listed[first], "a group names its commands"


def test_ranks_of_a_command_without_a_model_share_none() -> None:
    [health] = [offer for offer in OFFERS if offer.type == "doctor gpus"]
    [ranks] = [action for action in parsed(health, []).parser._actions if "--nproc" in action.option_strings]
    assert ranks.help.endswith(" (1)"), "its default"
    assert "share" not in ranks.help
