"""The task that dstack is given: golden files, dstack's own parser and interpolation, and bash."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from dstack.api import Task

from forge_plugin_dstack.task import run_name

HERE = Path(__file__).parent
GOLDEN = sorted((HERE / "golden").glob("*.toml"))


def rendered(submit, file: Path) -> tuple[int, str, str]:
    """The task of a golden file; half of them send the folder above."""
    folder = Path("project")
    folder.mkdir()
    shutil.copy("job.toml", folder)
    shutil.copy(file, folder / "dstack.toml")
    os.chdir(folder)
    return submit("--print", "--train.steps=8")


@pytest.mark.parametrize("file", GOLDEN, ids=lambda path: path.stem)
def test_a_task_is_the_golden_one(submit, file: Path) -> None:
    code, text, err = rendered(submit, file)
    assert code == 0, err
    assert text == file.with_suffix(".yaml").read_text()


def test_dstack_reads_what_was_meant() -> None:
    two, one = (read(f"{name}_node{'s' * (name == 'two')}") for name in ("two", "one"))
    assert (two.nodes, two.resources.gpu.name, two.resources.gpu.count.min, two.resources.gpu.count.max) == (
        2,
        ["H100"],
        4,
        4,
    )
    assert (two.spot_policy.value, two.stop_criteria.value, two.shell) == ("auto", "master-done", "bash")
    assert {event.value for event in two.retry.on_events} == {"no-capacity", "interruption", "error"}
    assert two.retry.duration == 86_400
    assert [(each.instance_path, each.path) for each in two.volumes] == [("/mnt/nfs/runs", "/runs")]
    assert {**two.env}["NCCL_DEBUG"] == "WARN"
    # By name alone: the value is that of the environment in which `dstack apply` runs
    assert str({**two.env}["WANDB_API_KEY"]) == "EnvSentinel(WANDB_API_KEY)"
    assert (one.nodes, one.max_price, one.python.value, one.retry.duration) == (1, 4.5, "3.12", 6 * 3600)
    assert [each.value for each in one.backends] == ["aws", "gcp"]
    assert one.stop_criteria is None


def read(name: str) -> Task:
    return Task.model_validate(yaml.safe_load((HERE / "golden" / f"{name}.yaml").read_text()))


FORGE_RUN = '#!/bin/bash\necho $$ "$PWD" "$FORGE_ATTEMPT" "$@" >> $OUT\nexit ${CODE:-0}\n'


@pytest.mark.parametrize(("starts", "first"), [(0, 75), (3, 0), (1, 1)], ids=["starts", "gives up", "fails"])
def test_bash_runs_the_commands_on_each_node(submit, tmp_path: Path, starts: int, first: int) -> None:
    """Also where the first node gives up, which must be no failure to dstack, or cannot know."""
    code, text, err = rendered(submit, HERE / "golden" / "two_nodes.toml")
    assert code == 0, err
    for name, script in {"forge-run": FORGE_RUN, "python3": f"#!/bin/bash\nexit {starts}\n"}.items():
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    ends = []
    for rank in ("0", "1"):
        variables = {
            "PATH": os.environ["PATH"],
            "DSTACK_NODE_RANK": rank,
            "DSTACK_MASTER_NODE_IP": "10.0.0.1",
            "DSTACK_RUN_ID": "run-7",
            "OUT": str(tmp_path / f"out{rank}"),
            "CODE": "75",
        }
        # As dstack joins them; its copy of `files` is the folder above here
        command = ["bash", "-c", " && ".join(yaml.safe_load(text)["commands"])]
        with subprocess.Popen(command, env=variables, cwd=tmp_path) as process:
            ends.append(process.wait())
    assert ends == [first, 75]
    words = "launch local job.toml --train.steps=8 --nproc=4 --nodes=2"
    # The program in the place of the shell: the one signal of dstack reaches it
    expected = f"{process.pid} {tmp_path}/project run-7 {words} --node=1 --address=10.0.0.1\n"
    assert (tmp_path / "out1").read_text() == expected
    assert (tmp_path / "out0").exists() is (starts == 0)


def test_a_setup_that_fails_starts_nothing(submit, tmp_path: Path) -> None:
    Path("dstack.toml").write_text('[cluster]\ntype = "dstack"\nsetup = ["false"]\nvolumes = ["v:/runs"]\n')
    commands = yaml.safe_load(submit("--print")[1])["commands"]
    command = ["bash", "-c", " && ".join(commands)]
    (tmp_path / "bin" / "forge-run").write_text("#!/bin/bash\ntouch started\n")
    (tmp_path / "bin" / "python3").write_text("#!/bin/bash\ntouch started\n")
    for name in ("forge-run", "python3"):
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"PATH": os.environ["PATH"], "DSTACK_NODE_RANK": "0", "DSTACK_RUN_ID": "1"}
    assert subprocess.run(command, env=variables, check=False).returncode == 1
    assert not Path("started").exists()


@pytest.mark.parametrize("name", ["long", "Long", "a.b", "7B", "x" * 90, "x" * 41, "z"])
def test_names_are_dstacks(name: str) -> None:
    made = run_name(name)
    assert re.fullmatch("[a-z][a-z0-9-]{1,40}", made)
    assert (made == name) is (name in ("long", "x" * 41))


def test_names_that_become_similar_stay_apart() -> None:
    assert len({run_name(name) for name in ("a.b", "a-b", "a_b", "A-b")}) == 4
