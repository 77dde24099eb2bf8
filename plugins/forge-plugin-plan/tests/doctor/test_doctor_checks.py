"""Each check in surroundings that are not as they should be: made for real where that is possible."""

from __future__ import annotations

import fcntl
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from forge_core.plugins.catalog import Catalog, Offer
from forge_plugin_plan.doctor import file_system, machine, network, packages, ranks, scheduler
from forge_plugin_plan.doctor.examination import examine
from forge_plugin_plan.doctor.job import check_job
from forge_plugin_plan.doctor.ranks import Ranks, check_collectives, driver_gpus
from forge_plugin_plan.doctor.results import Result, State, ok
from forge_testing import refusals

ON_A_MOUNT = """
import sys
from pathlib import Path
from types import SimpleNamespace
from forge_plugin_plan.doctor.file_system import check_output
for result in check_output(SimpleNamespace(output=Path(sys.argv[1]))):
    print(result.state, result.name, result.seen, result.mend, sep="|")
"""


def on_a_mount(folder: Path, options: str) -> dict[str, list[str]]:
    """Run the check of the output in a mount namespace in which `folder` is a tmpfs; state, text and mend by name."""
    folder.mkdir()
    script = f'mount -t tmpfs -o {options} none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--mount", "sh", "-ec", script, "sh", str(folder), sys.executable, ON_A_MOUNT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine makes no mount namespaces: {done.stderr.strip()[-100:]}")
    return {fields[1]: fields for fields in (line.split("|") for line in done.stdout.splitlines())}


# --- file systems ------------------------------------------------------------------------------------------------


def test_a_read_only_folder_fails(here: Path) -> None:
    [fields] = on_a_mount(here / "mounted", "ro").values()
    assert fields[:2] == ["failed", "output"]
    assert "Read-only file system" in fields[2]
    assert "job.output" in fields[3]


def test_a_full_file_system_fails_where_it_is_full(here: Path) -> None:
    found = on_a_mount(here / "mounted", "size=4m")
    assert found["output"][0] == "ok"
    assert "tmpfs" in found["output"][2]
    assert found["output: space"][0] == "failed"
    assert found["output: fsync"][0] == "failed"
    assert "No space left on device" in found["output: fsync"][2]


def test_an_output_that_is_a_file_fails(here: Path, around) -> None:
    (here / "afile").write_text("")
    [result] = file_system.check_output(around(output=here / "afile" / "runs"))
    assert (result.state, refusals.lacks(result.seen, here / "afile")) == (State.FAILED, [])


def test_locks_that_keep_nobody_out_fail(here: Path, around, one, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(file_system.check_output(around()), "output: flock").state == State.OK
    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)  # as on NFS with `nolock`
    result = one(file_system.check_output(around()), "output: flock")
    assert result.state == State.FAILED
    assert not refusals.lacks(result.seen, "lock")


def test_data_that_come_back_changed_fail(around, one, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = iter([b"a" * 2**20, b"b" * 2**20])
    monkeypatch.setattr(file_system.os, "urandom", lambda count: next(blocks))
    real = Path.open

    def lossy(self: Path, mode: str = "r", *rest, **more):
        if mode == "rb" and self.name == "data":
            with real(self, "r+b") as file:
                file.seek(2**20 + 7)
                file.write(b"x")
        return real(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", lossy)
    result = one(file_system.check_output(around()), "output: fsync")
    assert result.state == State.FAILED
    assert not refusals.lacks(result.seen, "written", "read")


def test_a_clock_that_differs_from_the_file_servers_is_a_warning(around, one, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr(file_system.time, "time", lambda: now() + 90)
    result = one(file_system.check_output(around()), "output: clock")
    assert result.state == State.WARNING
    assert "90.0" in result.seen


def test_nothing_is_left_in_folders_that_were_tried(here: Path, around) -> None:
    (here / "runs").mkdir()
    list(file_system.check_output(around()))
    list(file_system.check_cache(around()))
    assert [path.name for path in here.rglob("*")] == ["runs"]


# --- machine -----------------------------------------------------------------------------------------------------


def limited(**limits: int) -> str:
    """The limits as a process sees them whose own are lowered."""
    code = "from forge_plugin_plan.doctor.machine import check_limits\n"
    code += "for r in check_limits(None): print(r.state, r.name, r.seen, r.mend, sep='|')"

    def lower() -> None:
        for name, value in limits.items():
            which = getattr(resource, f"RLIMIT_{name}")
            resource.setrlimit(which, (value, resource.getrlimit(which)[1]))

    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=lower).stdout


def test_low_limits_are_named() -> None:
    assert limited(NOFILE=100).startswith("failed|open files|100 ")
    assert "|ulimit -n " in limited(NOFILE=100)
    assert limited(NOFILE=512).startswith("warning|open files|512 ")
    assert limited(NOFILE=1024).startswith("ok|open files|1,024 ")
    assert not refusals.lacks(limited(FSIZE=100_000_000), "failed|file size|", "0.10 GB")
    assert "warning|address space|limited to 8.0 GiB" in limited(AS=8 * 2**30)


@pytest.mark.parametrize(("value", "state"), [("abc", "warning"), ("0", "warning"), ("4096", "warning"), ("1", "ok")])
def test_threads_that_are_no_number_or_too_many_are_a_warning(value, state, around, one) -> None:
    assert one(machine.check_cores(around({"OMP_NUM_THREADS": value})), "OMP_NUM_THREADS").state == state


def test_limits_of_a_cgroup_are_read(here: Path) -> None:
    (here / "cpu.max").write_text("150000 100000\n")
    (here / "memory.max").write_text("1073741824\n")
    assert machine.quota(here / "cpu.max") == 1.5
    assert machine.limit_in(here / "memory.max") == 2**30
    (here / "cpu.max").write_text("max 100000\n")
    (here / "memory.max").write_text("max\n")
    assert machine.quota(here / "cpu.max") is None
    assert machine.limit_in(here / "memory.max") is None
    assert machine.quota(here / "absent") is None


# --- network and scheduler ---------------------------------------------------------------------------------------


def test_a_port_in_use_is_a_warning(around, one) -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        assert one(network.check_ports(around({"MASTER_PORT": port})), "MASTER_PORT").state == State.WARNING
    assert one(network.check_ports(around({"MASTER_PORT": port})), "MASTER_PORT").state == State.OK


def test_a_host_name_without_an_address_is_a_warning(around, one, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.socket, "gethostname", lambda: "no-such-host.invalid")
    results = list(network.check_host(around()))
    assert one(results, "host name").state == State.WARNING
    assert one(results, "loopback").state == State.OK


def test_adapters_that_are_down_are_found(here: Path, monkeypatch: pytest.MonkeyPatch, around) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = here / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    assert network.adapter_states(here) == {"mlx5_0/1": "ACTIVE", "mlx5_1/1": "DOWN"}
    monkeypatch.setattr(network, "ADAPTERS", here)
    [result] = network.check_adapters(around())
    assert (result.state, refusals.lacks(result.seen, "1 of 2", "mlx5_1/1")) == (State.WARNING, [])


def test_variables_of_a_launcher_that_contradict_each_other_fail(around) -> None:
    [result] = scheduler.check_launcher(around({"RANK": "1"}))
    assert result.state == State.FAILED
    assert "WORLD_SIZE" in result.seen
    [result] = scheduler.check_launcher(around())
    assert result.state == State.OK


def test_a_slurm_job_is_looked_at(around, states, one, program) -> None:
    path = program("scontrol", 'echo "JobId=$3 Requeue=0 Restarts=0"')
    allotted = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"}
    variables = allotted | {"SLURM_JOB_END_TIME": str(int(time.time()) + 120)}
    found = list(scheduler.check_slurm(around(variables)))
    assert states(found)["tasks"] == states(found)["time limit"] == State.WARNING
    assert not refusals.lacks(one(found, "time limit").seen, "2 minutes")
    without = states(scheduler.check_slurm(around(allotted)))
    assert without["time limit"] == State.NOT_RUN
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        assert one(scheduler.check_slurm(around(allotted)), "requeue").state == State.WARNING
        program("scontrol", "echo Requeue=1")
        assert one(scheduler.check_slurm(around(allotted)), "requeue").state == State.OK
    assert one(scheduler.check_slurm(around(allotted)), "requeue").state == State.NOT_RUN


# --- packages, devices, job --------------------------------------------------------------------------------------


def test_requirements_that_are_not_met_are_named(monkeypatch: pytest.MonkeyPatch, around, one) -> None:
    needs = ("forge-run>=99", "rich>=1", 'numpy>=1; python_version < "3"')
    old = packages.Distribution("forge-plugin-old", "1.0", needs)
    lacks = packages.Distribution("forge-plugin-lacks", "1.0", ("rich>=99", "no-such-package-here>=1"))
    monkeypatch.setattr(packages, "distributions", lambda: [old, lacks])
    result = one(packages.check_versions(around()), "requirements")
    assert result.state == State.FAILED
    assert not refusals.lacks(result.seen, "forge-plugin-old 1.0", "forge-run>=99")
    assert not refusals.lacks(result.seen, "forge-plugin-lacks 1.0", "rich>=99", "no-such-package-here>=1")
    assert result.mend == "pip install --upgrade forge-run 'rich>=99' 'no-such-package-here>=1'"


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2.10.1", State.FAILED),
        ("2.11.0+cu130", State.OK),
        ("2.16.0", State.WARNING),
        ("2.16.0a0+git1", State.WARNING),
    ],
)
def test_a_torch_outside_the_tested_range_is_one_line(around, one, monkeypatch, version, state) -> None:
    facts = {"torch": version, "cuda": None, "hip": None}
    processes = SimpleNamespace(facts=lambda: facts, trouble=list)
    tested = SpecifierSet(">=2.11,<2.16")
    monkeypatch.setattr(packages, "tested_torch", lambda: tested)
    monkeypatch.setattr(ranks, "tested_torch", lambda: tested)
    result = one(ranks.check_torch(around(ranks=processes)), "torch")
    assert result.state == state
    if state != State.OK:
        assert str(tested) in result.mend
    plain = packages.metadata.version
    monkeypatch.setattr(packages.metadata, "version", lambda name: version if name == "torch" else plain(name))
    plugin = packages.Distribution("forge-plugin-one", "1.0", ("torch>=2.11,<2.16",))
    monkeypatch.setattr(packages, "distributions", lambda: [plugin])
    assert one(packages.check_versions(around()), "requirements").state == State.OK


def test_an_editable_install_that_is_stale_is_named_with_the_line_that_refreshes_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, around, one
) -> None:
    (here / "pyproject.toml").write_text('[project.entry-points."forge.optimizer"]\nsame = "m:A"\nnew = "m:B"\n')
    url = f'{{"url": "file://{here}", "dir_info": {{"editable": true}}}}'
    mine = packages.Distribution("forge-plugin-mine", "1.0", (), url)
    offers = [Offer("optimizer", name, "m:A", mine) for name in ("same", "gone")]
    monkeypatch.setattr(Catalog, "installed", lambda: Catalog(offers))
    result = one(packages.check_versions(around()), "editable install")
    assert result.state == State.WARNING
    assert result.seen.endswith(": optimizer gone, optimizer new")
    assert result.mend == f"pip install --no-deps -e {here}"


def test_gpus_that_only_the_driver_sees_are_known(program) -> None:
    path = program("nvidia-smi", 'echo "NVIDIA H100 80GB HBM3, 570.86.10"')
    assert driver_gpus(path) == ["NVIDIA H100 80GB HBM3, 570.86.10"]
    program("nvidia-smi", "exit 9")
    assert driver_gpus(path) == []


def test_a_job_that_is_wrong_fails_with_its_problems(here: Path, around) -> None:
    (here / "job.toml").write_text("[train]\nsteps = 0\n")
    [result] = check_job(around(files=["job.toml"]))
    assert result.state == State.FAILED
    assert not refusals.lacks(result.seen, "job.toml:2", "train.steps", "> 0", 0)
    [result] = check_job(around())
    assert result.state == State.NOT_RUN


# --- checks as such ----------------------------------------------------------------------------------------------


def test_a_rank_that_hangs_is_named_with_its_phase(around, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    (here / "torch.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(here))
    ranks = Ranks(2, 1.5)
    try:
        troubles = ranks.trouble()
        assert [refusals.lacks(text, f"rank {rank}", "signal 9") for rank, text in enumerate(troubles)] == [[], []]
        [result] = check_collectives(around(ranks=ranks))
        assert result.state == State.NOT_RUN
    finally:
        ranks.close()


def test_a_check_that_raises_or_hangs_is_a_failure_of_its_own(around, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_raising(surroundings):
        yield ok("before", "seen")
        raise KeyError("lost")

    def check_hanging(surroundings):
        yield ok("early", "seen")
        time.sleep(30)

    monkeypatch.setattr("forge_plugin_plan.doctor.examination.LIMIT_S", 0.2)
    monkeypatch.setattr("forge_plugin_plan.doctor.examination.MARGIN_S", 0.0)
    checks = [("group", check_raising), ("group", check_hanging)]
    slow = around()
    slow.ranks.limit_s = 0.2
    results: list[Result] = [one.result for one in examine(slow, checks)]
    assert [result.state for result in results] == [State.OK, State.FAILED, State.OK, State.FAILED]
    assert "KeyError: 'lost'" in results[1].seen
    assert not refusals.lacks(results[3].seen, "0.2 s")


def test_the_folder_that_is_checked_is_that_which_training_writes_to(tmp_path: Path, monkeypatch) -> None:
    from forge_core.checkpoint.run_folder import run_folder
    from forge_core.config.load import load_job
    from forge_plugin_plan.doctor.job import read_output
    from forge_testing import TINY_JOB

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "job.toml").write_text(TINY_JOB)
    words: tuple = [str(tmp_path / "job.toml")], ["--job.output=~/elsewhere"]
    assert read_output(*words, 1) == str(tmp_path / "elsewhere")
    assert run_folder(load_job(*words[0], overrides=words[1])).parent == tmp_path / "elsewhere"
