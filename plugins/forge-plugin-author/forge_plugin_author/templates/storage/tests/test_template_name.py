"""template_name keeps the contracts of plugins and of storages, and does what it says."""

import pytest
from forge_plugin_template_name import TemplateName

from forge_testing.distribution import check_distribution


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


def test_a_run_continues_from_what_is_stored_elsewhere(make_job, train, lines, tmp_path):
    def losses(name, *lengths):
        storage = {"storage": TemplateName(path=str(tmp_path / "disk")), "interval": 2}
        for steps in lengths:
            summary = train(make_job(job={"name": name}, steps=steps, checkpoint=storage))
        return [line["loss"] for line in lines(summary)]

    assert losses("parts", 3, 6) == losses("whole", 6)
    assert (tmp_path / "disk" / "parts" / "step-6").is_dir()
    assert not list((tmp_path / "parts").rglob("step-*"))


def test_what_was_not_committed_is_not_there(make_job, tmp_path):
    class Context:
        job = make_job(job={"name": "run"})

    storage = TemplateName(path=str(tmp_path)).build(Context)
    for step in (1, 2):
        (storage.begin(step) / "file").write_text("")
        storage.commit(step)
    storage.begin(3)
    assert list(storage.steps()) == [1, 2]
    storage.clear()
    storage.delete(1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-2"]


def test_an_empty_path_is_refused():
    with pytest.raises(ValueError, match="path"):
        TemplateName(path="")
