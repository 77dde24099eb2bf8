"""Which rank a process is, as the variables of a launcher say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from forge_core import Environment
from forge_core.launch import world as world_module
from forge_core.launch.world import World, join_world
from forge_core.parallel.mesh import choose_device
from forge_testing.refusals import naming, refuses

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29400",
}


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}])
def test_a_process_that_no_launcher_started_is_alone(variables):
    assert join_world(dict(variables)) == World()


def test_torchrun_tells_all():
    world = join_world(dict(TORCHRUN))
    assert (world.rank, world.size, world.address, world.port) == (3, 4, "host", 29400)


class OpenMpi(Environment):
    """A stranger's."""

    def rank(self, variables):
        if "OMPI_COMM_WORLD_RANK" not in variables:
            return {}
        names = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
        found = {name: variables[f"OMPI_COMM_WORLD_{theirs}"] for name, theirs in names.items()}
        return found | {"MASTER_ADDR": "host", "MASTER_PORT": "29400"}


MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_another_launcher_is_a_component(monkeypatch):
    monkeypatch.setattr(world_module, "environments", lambda: {"mpi": OpenMpi()})
    variables = dict(MPI)
    assert join_world(variables) == World(rank=3, size=4, address="host", port=29400, spread=True)
    assert {name: variables[name] for name in TORCHRUN} == TORCHRUN, "as torch reads them"
    assert join_world(MPI | {"RANK": "0", "WORLD_SIZE": "1"}) == World(), "variables of torchrun come first"
    assert join_world({}) == World()


def test_a_rank_of_two_launchers_is_refused(monkeypatch):
    monkeypatch.setattr(world_module, "environments", lambda: {"mpi": OpenMpi(), "other": OpenMpi()})
    with refuses("", "mpi", "other", "RANK"):
        join_world(dict(MPI))


@pytest.mark.parametrize(
    ("variables", "facts"),
    [
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE", 4, "RANK"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR", "MASTER_PORT"]),
        (TORCHRUN | {"RANK": "4"}, ["RANK is 4", "WORLD_SIZE 4", "0 to 3"]),
        (TORCHRUN | {"MASTER_PORT": "x"}, ["MASTER_PORT", "'x'"]),
    ],
)
def test_variables_that_make_no_sense_are_named(variables, facts):
    with refuses("", *facts):
        join_world(dict(variables))


def test_more_ranks_than_gpus_train_on_the_cpu_and_say_so(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (TORCHRUN | {"RANK": "0", "LOCAL_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=naming("4 ranks", "2 of cuda", "CPU")):
        assert choose_device("auto") == torch.device("cpu")
    with refuses("train.device", '"cuda"', "4 ranks", "2 of cuda"):
        choose_device("cuda")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_device("auto") == torch.device("cuda", 1)


@pytest.mark.parametrize("name", ["cdua", "npu", "cuda:1", "meta"])
def test_a_device_that_torch_does_not_know_is_refused_by_name(name):
    with refuses("train.device", f'"{name}"'):
        choose_device(name)


def test_a_module_of_a_vendor_without_what_a_run_needs_is_refused_with_what_it_lacks(monkeypatch):
    module = SimpleNamespace(device_count=lambda: 1, synchronize=lambda: None)
    monkeypatch.setattr(torch, "get_device_module", lambda name: module)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("hpu"))
    for name in ("hpu", "auto"):
        with refuses("train.device", f'"{name}"', "lacks Event, manual_seed"):
            choose_device(name)
