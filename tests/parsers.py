"""The parser of each command, taken out of it before it parses anything."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from forge_core.plugins.catalog import Catalog, Offer, first_party

OFFERS = [offer for offer in Catalog.installed().offers("command") if offer.type in first_party()["command"]]
OFFERS += [offer for offer in Catalog.installed().offers("command") if offer.distribution.name == "forge-run"]


class Made(BaseException):
    """Carries a parser and what it was asked to parse out of a command."""

    def __init__(self, parser: argparse.ArgumentParser, argv: list[str]) -> None:
        super().__init__()
        self.parser, self.argv = parser, argv


def parsed(offer: Offer, argv: list[str]) -> Made:
    def parse(parser: argparse.ArgumentParser, args: list[str] | None = None, namespace: object = None) -> None:
        raise Made(parser, list(args or []))

    with patch.object(argparse.ArgumentParser, "parse_known_args", parse), pytest.raises(Made) as made:
        Catalog.installed().load_offer(offer)(argv)
    return made.value


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()
