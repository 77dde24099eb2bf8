"""Records of texts that a model wrote: what is read is what was written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forge_kit.tools.sampled_texts import FILE, SampledText, SampledTexts, last_samples, visible

TEXTS = st.text(st.characters())  # with control characters, line breaks of all kinds and lone surrogates
SAMPLED = st.builds(
    SampledTexts,
    step=st.integers(0),
    texts=st.lists(st.builds(SampledText, prompt=TEXTS, text=TEXTS), max_size=3).map(tuple),
)


@given(st.lists(SAMPLED, max_size=4), st.integers(1, 3))
def test_the_last_records_are_read_newest_first(tmp_path_factory, written, count):
    folder = tmp_path_factory.mktemp("run")
    for sampled in written:
        sampled.append(folder)
    assert last_samples(folder, count) == written[::-1][:count]


def test_a_line_that_a_killed_process_began_is_ignored(tmp_path):
    first, second, third = (SampledTexts(step=step, texts=()) for step in (1, 2, 3))
    first.append(tmp_path)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 2, "te')
    assert last_samples(tmp_path, 3) == [first]
    second.append(tmp_path)
    third.append(tmp_path)
    assert last_samples(tmp_path, 3) == [third, second, first]


def test_a_run_without_samples_has_none(tmp_path):
    assert last_samples(tmp_path, 3) == []


def test_what_is_shown_can_be_encoded_and_has_no_control_characters():
    sampled = SampledTexts(step=1, texts=(SampledText(prompt="a\x1b[31m", text="b\ud800\n"),))
    assert sampled.for_people() == "a\\x1b[31mb\\ud800\n"
    assert visible("a\tb") == "a\tb"
    sampled.for_people().encode()
