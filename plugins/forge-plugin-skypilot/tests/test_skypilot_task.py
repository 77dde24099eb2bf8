"""The task that SkyPilot is given: golden files, SkyPilot's own parser, and bash."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from forge_plugin_skypilot.schema import problem_of
from forge_plugin_skypilot.task import job_name

HERE = Path(__file__).parent
GOLDEN = sorted((HERE / "golden").glob("*.toml"))
PYTHON = os.environ.get("SKYPILOT_PYTHON", "")
with_skypilot = pytest.mark.skipif(not PYTHON, reason="SKYPILOT_PYTHON names no Python of an environment with SkyPilot")


@pytest.mark.parametrize("file", GOLDEN, ids=lambda path: path.stem)
def test_a_task_is_the_golden_one_which_skypilots_schema_accepts(submit, file: Path) -> None:
    code, text, err = rendered(submit, file)
    assert code == 0, err
    assert text == file.with_suffix(".yaml").read_text()
    assert problem_of(yaml.safe_load(text)) == ""


def rendered(submit, file: Path) -> tuple[int, str, str]:
    folder = Path("project")
    folder.mkdir()
    shutil.copy("job.toml", folder)
    shutil.copy(file, folder / "sky.toml")
    os.chdir(folder)
    # Half of the golden files send the folder above
    return submit("--print", "--train.steps=8")


def test_the_schema_refuses_what_skypilot_does() -> None:
    task = yaml.safe_load(GOLDEN[0].with_suffix(".yaml").read_text())
    assert "num_node" in problem_of({**task, "num_node": 2})
    assert "disk_sise" in problem_of({**task, "resources": {"disk_sise": 5}})
    assert "recover_on_exit_codes" in problem_of(
        {**task, "resources": {"job_recovery": {"recover_on_exit_codes": ["x"]}}}
    )
    assert "MOUNTED" in problem_of({**task, "file_mounts": {"/x": {"source": "s3://b", "mode": "MOUNTED"}}})


@with_skypilot
def test_skypilot_itself_reads_each_golden_task_as_it_was_meant() -> None:
    files = [str(file.with_suffix(".yaml")) for file in GOLDEN]
    done = subprocess.run([PYTHON, HERE / "vendor_parser.py", *files], capture_output=True, text=True, check=True)
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert read == json.loads((HERE / "golden" / "parsed.json").read_text())


@with_skypilot
def test_the_schema_is_skypilots_own() -> None:
    done = subprocess.run([PYTHON, HERE / "vendor_schema.py"], capture_output=True, text=True, check=True)
    ours = HERE.parent / "forge_plugin_skypilot" / "task.schema.json"
    assert json.loads(done.stdout) == json.loads(ours.read_text())


FORGE_RUN = '#!/bin/bash\necho $$ "$PWD" "$FORGE_ATTEMPT" "$@" >> $OUT\nexit ${CODE:-0}\n'


@pytest.mark.parametrize("gives_up", [False, True])
def test_bash_runs_the_command_on_each_node_and_the_first_may_give_up(submit, tmp_path: Path, gives_up: bool) -> None:
    code, text, err = rendered(submit, HERE / "golden" / "two_nodes.toml")
    assert code == 0, err
    for name, script in {"forge-run": FORGE_RUN, "python3": f"#!/bin/bash\nexit {3 if gives_up else 0}\n"}.items():
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    ends = []
    for rank in ("0", "1"):
        variables = {
            "PATH": os.environ["PATH"],
            "SKYPILOT_NODE_RANK": rank,
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "SKYPILOT_TASK_ID": "sky-managed-7",
            "OUT": str(tmp_path / f"out{rank}"),
            "CODE": "75",
        }
        # SkyPilot runs it in the copy of `workdir`, which is the folder above here
        command = ["bash", "-c", yaml.safe_load(text)["run"]]
        with subprocess.Popen(command, env=variables, cwd=tmp_path) as process:
            ends.append(process.wait())
    assert ends == [1 if gives_up else 75, 75]
    words = "launch local job.toml --train.steps=8 --nproc=4 --nodes=2"
    expected = f"{tmp_path}/project sky-managed-7 {words} --node=1 --address=10.0.0.1\n"
    # The program in the place of the shell: signals of SkyPilot reach it
    assert (tmp_path / "out1").read_text() == f"{process.pid} {expected}"
    assert (tmp_path / "out0").exists() is not gives_up


@pytest.mark.parametrize(
    ("name", "begin"), [("long", "long"), ("Long-2", "Long-2"), ("a.b", "a-b-"), ("7B", "run-7B-"), ("x" * 90, "xxx")]
)
def test_names_are_skypilots(name: str, begin: str) -> None:
    made = job_name(name)
    assert made.startswith(begin)
    assert re.fullmatch("[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?", made)
    assert len(made) <= 60
    assert (made == name) is (name in ("long", "Long-2"))


def test_names_that_become_similar_stay_apart() -> None:
    assert len({job_name(name) for name in ("a.b", "a-b", "a_b")}) == 3
