"""Checks of names, ports and adapters."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from forge_kit.tools.slurm_step import PORTS
from forge_plugin_plan.doctor.results import Result, Surroundings, failed, ok, warning

LOCALHOST = "127.0.0.1"
TRIED = 16
"""Ports of the range for SLURM steps that are tried."""
ADAPTERS = Path("/sys/class/infiniband")


def check_host(_: Surroundings) -> Iterator[Result]:
    """Whether this machine's name leads to an address, and a connection to itself carries bytes."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        mend = f"ranks on other machines look for it: add a line for {name} to /etc/hosts, or to the name server"
        yield warning("host name", f"{name} has no address ({error})", mend)
    else:
        yield ok("host name", f"{name} is {address}")
    try:
        received = _sent_to_itself(b"forge")
    except OSError as error:
        mend = "allow connections of this machine to itself: bring the interface `lo` up"
        yield failed("loopback", f"{type(error).__name__}: {error}", mend)
        return
    if received == b"forge":
        yield ok("loopback", f"a connection to {LOCALHOST} carries bytes")
    else:
        yield failed("loopback", f"sent 'forge', received {received!r}", "look for a proxy that takes such connections")


def _sent_to_itself(data: bytes) -> bytes:
    with (
        socket.create_server((LOCALHOST, 0)) as server,
        socket.create_connection(server.getsockname(), timeout=5) as client,
        server.accept()[0] as accepted,
    ):
        client.sendall(data)
        return accepted.recv(len(data))


def check_ports(surroundings: Surroundings) -> Iterator[Result]:
    """Check whether the ports on which ranks meet are free: MASTER_PORT, and the ports for SLURM steps."""
    port = surroundings.environment.get("MASTER_PORT", "")
    if port.isdecimal():
        free = _is_free(int(port))
        mend = "unset MASTER_PORT, or end the program that listens there"
        # Rank 0 of a launcher may listen there already: then it is no mistake.
        yield ok("MASTER_PORT", f"{port} is free") if free else warning("MASTER_PORT", f"{port} is in use", mend)
    # Spread evenly over the range, as programs often take neighbouring ports
    tried = [PORTS[number * len(PORTS) // TRIED] for number in range(TRIED)]
    taken = [port for port in tried if not _is_free(port)]
    seen = f"{len(tried) - len(taken)} of {len(tried)} tried in {PORTS.start} to {PORTS.stop - 1} are free"
    mend = "end the programs that listen there, or set MASTER_PORT for runs under srun"
    yield warning("ports", f"{seen}; in use: {', '.join(map(str, taken))}", mend) if taken else ok("ports", seen)


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False


def check_adapters(_: Surroundings) -> Iterator[Result]:
    """Whether the ports of InfiniBand or RoCE adapters are up; nothing where there are none."""
    states = adapter_states(ADAPTERS)
    if down := [name for name, state in states.items() if state != "ACTIVE"]:
        seen = f"{len(states) - len(down)} of {len(states)} ports are up; down: {', '.join(down)}"
        yield warning(
            "InfiniBand", seen, "leave it out (NCCL_IB_HCA), or have the cable and the subnet manager checked"
        )
    elif states:
        yield ok("InfiniBand", f"{', '.join(states)} are up")


def adapter_states(folder: Path) -> dict[str, str]:
    """Returns the state of each port (`mlx5_0/1`), as the kernel has it: ACTIVE, DOWN, INIT."""
    files = sorted(folder.glob("*/ports/*/state"))
    return {f"{file.parts[-4]}/{file.parts[-2]}": file.read_text().partition(":")[2].strip() for file in files}
