"""Files that are read while they are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core import files
from forge_core.files import lines_from_end, write_atomically
from forge_core.metrics.jsonl import JsonLinesLogger


@given(lines=st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b" "))), block=st.integers(1, 12))
def test_lines_from_the_end_are_all_lines_with_their_places(tmp_path_factory, lines, block):
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(b"\n".join(lines))
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(files, "BLOCK", block)
        seen = list(lines_from_end(file))
    assert [line for _, line in reversed(seen)] == (lines or [b""])
    content = path.read_bytes()
    assert all(content[place : place + len(line)] == line for place, line in seen)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "facts"
    write_atomically(path, "old")
    with pytest.raises(TypeError):
        write_atomically(path, None)
    assert path.read_text() == "old"
    write_atomically(path, b"new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["facts"]


@pytest.mark.parametrize(("step", "kept"), [(0, 0), (2, 3), (9, 4)])
def test_lines_after_the_step_of_a_resume_are_removed(tmp_path, step, kept):
    path = tmp_path / "metrics.jsonl"
    lines = [
        '{"step": 1, "loss": 1}\n',
        '{"step": 2, "loss": 1}\n',
        '{"step": 2, "eval/loss": 1}\n',
        '{"step": 3, "loss": 1}\n',
    ]
    path.write_text("".join(lines) + '{"step": 4, "lo')
    logger = JsonLinesLogger(path)
    logger.start(step)
    logger.log({"step": step + 1})
    logger.close()
    assert path.read_text() == "".join(lines[:kept]) + f'{{"step": {step + 1}}}\n'
