"""Files of data are looked at once per run, whatever the number of ranks: not once per rank."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.distributed.device_mesh import init_device_mesh

from forge_core.contracts.components import DatasetComponent
from forge_core.contracts.errors import JobError
from forge_plugin_memmap import Memmap
from forge_plugin_text import Text, corpus
from forge_plugin_text.bytes import ByteTokenizer
from forge_testing.processes import run_on_ranks

FILES = 12


def write_shards(folder: Path) -> DatasetComponent:
    for number in range(FILES):
        np.save(folder / f"{number}.npy", np.uint16([1, 2, 256]))
    return Memmap(path=str(folder), end_of_text=256)


def write_texts(folder: Path) -> DatasetComponent:
    for number in range(FILES):
        (folder / f"{number}.txt").write_text("text")
    return Text(path=str(folder))


def count_calls(folder: Path) -> Counter[str]:
    """Count calls of this process, from now on, that look at a file in a folder."""
    counts = Counter[str]()

    def note(path: Any) -> None:
        if isinstance(path, str | os.PathLike) and Path(path).parent == folder:
            counts[Path(path).name] += 1

    for name in ("stat", "lstat"):
        function = getattr(os, name)

        def noting(path: Any, *arguments: Any, function: Any = function, **options: Any) -> Any:
            note(path)
            return function(path, *arguments, **options)

        setattr(os, name, noting)
    sys.addaudithook(lambda event, arguments: note(arguments[0]) if event == "open" else None)
    return counts


def start(component: DatasetComponent) -> tuple[int, list[int]]:
    """What each rank does with a dataset at its start; returns the tokens, and how often it looked at each file."""
    tokenizer = ByteTokenizer()
    train, data = SimpleNamespace(seq_len=4), SimpleNamespace(tokenizer=object())
    job: Any = SimpleNamespace(train=train, data=data, model=SimpleNamespace(vocab_size=0))
    context: Any = SimpleNamespace(job=job, tokenizer=tokenizer, mesh=init_device_mesh("cpu", (2,)))
    counts = count_calls(Path(component.path))
    assert not list(component.problems(job, None))
    documents: Any = component.build(context)
    list(component.choices(context))
    return len(documents), [count for count in counts.values() if count]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(corpus, "SETTLED_AFTER_NS", -(1 << 62))  # as if the files were old
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize(("write", "of_rank0", "of_rank1"), [(write_shards, 2, 1), (write_texts, 1, 0)])
def test_rank_0_looks_at_files_for_all(folder: Path, write: Any, of_rank0: int, of_rank1: int) -> None:
    component = write(folder)
    run_on_ranks(2, lambda rank: start(component))  # reads the ids, or tokenises
    (tokens, first), (same, second) = run_on_ranks(2, lambda rank: start(component))
    assert tokens == same > 0
    assert sum(first) <= of_rank0 * FILES + 2  # and whether any text has a byte
    assert sum(second) <= of_rank1


def test_what_is_wrong_on_rank_0_ends_all_ranks(folder: Path) -> None:
    np.save(folder / "a.npy", np.uint16([1, 2, 300]))  # beyond the tokenizer's ids
    component = Memmap(path=str(folder), end_of_text=256)

    def problems(rank: int) -> list[str]:
        with pytest.raises(JobError) as caught:
            start(component)
        return [problem.message for problem in caught.value.problems]

    first, second = run_on_ranks(2, problems)
    assert first == second
    assert "token 2 is 300" in first[0]
