"""Decoding all that sources have, before training does: `forge-run check --decode`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest
from attrs import frozen

from forge_core.contracts.errors import ForgeError, JobError, Problem
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_kit.data.damage import Damage, Decodable, damage_of, decode_sources
from forge_testing import Numbers
from forge_testing.refusals import at, naming, refuses_all


class Files:
    """Four documents, of which the first ones are damaged."""

    def __init__(self, damaged: int) -> None:
        self._damaged = damaged

    def __len__(self) -> int:
        return 4

    def damage(self, number: int) -> list[str]:
        return [f"document {number} cannot be read"] if number < self._damaged else []


@frozen(kw_only=True)
class Encoded(Numbers):
    """Has files to decode; with a negative number, its files are not there."""

    damaged: int = 0

    def decodable(self, context: object) -> Decodable:
        if self.damaged < 0:
            raise JobError([Problem("path", "missing.tar is not there")])
        return Decodable(documents=Files(self.damaged), key="max_unreadable", allowed=0.25)


def test_a_source_that_cannot_be_opened_is_named_by_its_key(make_job: Callable[..., Job], catalog: Catalog) -> None:
    job = make_job(data={"sources": (Numbers(), Encoded(damaged=-1))})
    with refuses_all(at("data.sources.1.path", "missing.tar")):
        list(decode_sources(job, catalog, 0, name_damage=print, progress=print))


def test_all_sources_are_decoded_before_those_with_too_much_damage_are_refused(
    make_job: Callable[..., Job], catalog: Catalog
) -> None:
    named: list[tuple[str, str]] = []
    decoded = []
    job = make_job(data={"sources": (Encoded(name="bad", damaged=2), Encoded(name="good", damaged=1))})
    with refuses_all(at("data.sources.0.max_unreadable", "2 of 4", "25.00%")):
        for result in decode_sources(job, catalog, 0, name_damage=lambda *each: named.append(each), progress=print):
            decoded += [result]
    assert decoded == [("bad", Damage(documents=4, damaged=2)), ("good", Damage(documents=4, damaged=1))]
    assert [name for name, _ in named] == ["bad", "bad", "good"]


class Crashed:
    """A pool of processes one of which has ended."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Crashed:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, *_: object) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(BrokenProcessPool())
        return future


def test_a_decoder_that_crashes_is_reported_with_the_option_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_kit.data.damage.ProcessPoolExecutor", Crashed)
    with pytest.raises(ForgeError, match=naming("--workers")):
        list(damage_of(Files(0), 2))
