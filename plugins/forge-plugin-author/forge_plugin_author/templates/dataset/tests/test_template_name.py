"""template_name keeps the contracts of plugins and of datasets, and does what it says."""

import pytest
from forge_plugin_template_name import TemplateName

from forge_core import JobError
from forge_testing.distribution import check_distribution
from forge_testing.suites import DatasetSuite


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


class TestTemplateName(DatasetSuite):
    def make(self, folder):
        (folder / "text.txt").write_text("The quick brown fox\njumps over the lazy dog.\n" * 30)
        return TemplateName(path=str(folder / "text.txt"))


def test_a_line_is_a_document_of_letters(tmp_path):
    (tmp_path / "text.txt").write_text("Ab!\n\nz\n")
    documents = TemplateName(path=str(tmp_path / "text.txt"), hold_out_every=2).build(context=None)
    assert documents.tokens(0, 4).tolist() == [2, 3, 1, 0]
    assert documents.held_out.tokens(0, 2).tolist() == [27, 0]


def test_a_file_that_is_not_there_is_told():
    with pytest.raises(JobError, match=r"path: cannot read 'absent.txt': .*; give a text file"):
        TemplateName(path="absent.txt").build(context=None)
