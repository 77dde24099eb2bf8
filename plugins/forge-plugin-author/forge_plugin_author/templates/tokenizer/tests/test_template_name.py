"""template_name keeps the contracts of plugins and of tokenizers."""

import pytest
from forge_plugin_template_name import TemplateName
from forge_plugin_template_name.characters import CharacterTokenizer

from forge_core import JobError
from forge_testing import Sentences
from forge_testing.distribution import check_distribution
from forge_testing.suites import DatasetSuite


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


class TestTemplateName(DatasetSuite):
    """Of a dataset whose texts it encodes."""

    component = Sentences()
    job = {"data": {"tokenizer": TemplateName(size=32)}}


def test_what_it_has_seen_comes_back_and_other_characters_are_marked():
    tokenizer = CharacterTokenizer.of(["abba", "a"], size=4)
    assert tokenizer.encode("abc") == [2, 3, 1]
    assert tokenizer.decode([2, 3, 1, tokenizer.end_of_text]) == "ab\ufffd"
    assert CharacterTokenizer.of(["abba"], size=3).characters == "a"


def test_it_is_the_same_once_saved_and_loaded(tmp_path):
    tokenizer = CharacterTokenizer.of(["some text"], size=20)
    tokenizer.save(tmp_path)
    loaded = TemplateName().load(None, tmp_path)
    assert loaded.encode("text") == tokenizer.encode("text")
    assert loaded.fingerprint() == tokenizer.fingerprint() != CharacterTokenizer.of(["more"], size=20).fingerprint()


def test_a_corpus_without_text_is_refused():
    with pytest.raises(JobError, match="no source has any text"):
        TemplateName().build(None, list)
