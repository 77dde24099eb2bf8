"""Commands and other runs read checkpoints through the storage that a run's job names: here that of the docs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from forge_core import Trainer, load_job
from forge_core.cli import main
from forge_core.contracts.errors import ResumeError
from forge_testing import TINY_JOB
from forge_testing.refusals import naming

PAGE = Path(__file__).parents[2] / "docs/ten-minutes/storage.md"
STORAGE = '[checkpoint]\ninterval = 2\nstorage = {type = "./mirrored.py:Mirrored", mirror = "other-disk"}\n'
ELSEWHERE = """
from pathlib import Path
from attrs import frozen
from forge_core import StorageComponent
from forge_core.checkpoint.storage import LocalStorage


@frozen(kw_only=True)
class Elsewhere(StorageComponent):
    folder: str = "disk"

    def build(self, context):
        return LocalStorage(Path(self.folder) / context.job.job.name)
"""


def job(name, checkpoint=STORAGE, text=TINY_JOB, **overrides):
    Path(f"{name}.toml").write_text(f'[job]\nname = "{name}"\n{text}{checkpoint}')
    return load_job(f"{name}.toml", overrides=[f"{key}={value}" for key, value in overrides.items()])


def train(made, **options):
    return Trainer(made, echo=lambda text: None, **options).run()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder in which a run with a mirror has been trained."""
    folder = tmp_path_factory.mktemp("trained")
    [code] = re.findall(r'```python title="mirrored.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("mirrored.py").write_text(code)
        Path("elsewhere.py").write_text(ELSEWHERE)
        train(job("mirrored"))
        train(
            job(
                "elsewhere",
                STORAGE.replace("mirrored.py:Mirrored", "elsewhere.py:Elsewhere").replace("mirror =", "folder ="),
            )
        )
    return folder


@pytest.fixture(autouse=True)
def here(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")


@pytest.mark.parametrize("name", ["mirrored", "elsewhere"])
def test_checkpoints_lists_and_verifies_them(name, capsys):
    assert main(["checkpoints", f"runs/{name}"]) == 0
    assert capsys.readouterr().out.count("intact") == 2
    assert main(["checkpoints", f"runs/{name}", "verify"]) == 0


def test_checkpoints_deletes_copies_too():
    assert main(["checkpoints", "runs/mirrored", "prune", "--keep", "1"]) == 0
    for folder in ("runs/mirrored/checkpoints", "other-disk/mirrored"):
        assert [path.name for path in Path(folder).iterdir()] == ["step-4"]


@pytest.mark.parametrize("name", ["mirrored", "elsewhere"])
def test_another_run_starts_from_them(name):
    assert train(job("resumed", "", **{"train.steps": 6}), resume=f"runs/{name}", resume_with_changes=True).step == 6
    assert train(job("loaded", f'[checkpoint]\nload = {{path = "runs/{name}"}}\n')).step == 4


def test_a_key_folder_of_another_storage_is_not_taken_for_the_cores(tmp_path):
    with pytest.raises(ResumeError, match=naming("other-disk/elsewhere", "[checkpoint.storage]")):
        train(job("elsewhere", "", **{"train.steps": 6}))
