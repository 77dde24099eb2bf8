"""Two machines that are network namespaces of this one, joined by a cable that can be pulled out."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.213.77.1", "10.213.77.2")
ENTER = '''
import ctypes
import os

from attrs import define
from forge_core import TrainingHook

with open(os.environ["MACHINE"]) as namespace:
    # Of this thread, and so of all that it starts; when a job is read, there is no other thread and no connection
    assert ctypes.CDLL(None).setns(namespace.fileno(), 0x40000000) == 0


@define(kw_only=True, slots=False)
class Machine(TrainingHook):
    """Its module puts the process onto a machine, so that processes start by a fork, without `ip netns exec`."""
'''


class Machines:
    """Two network namespaces with one address each, `ADDRESSES`."""

    def __init__(self) -> None:
        self.names = [f"forge-{os.getpid()}-{number}" for number in range(2)]
        self.cards = [f"fg{os.getpid() % 100_000}{end}" for end in "ab"]

    def inside(self, number: int) -> tuple[str, ...]:
        """The beginning of a command line that runs on one of them."""
        return ("ip", "netns", "exec", self.names[number])

    def environment(self, number: int) -> dict[str, str]:
        """Variables for `ENTER`, and for gloo, which would look for the address of this machine's name."""
        machine = f"/var/run/netns/{self.names[number]}"
        return {"MACHINE": machine, "GLOO_SOCKET_IFNAME": self.cards[number], "MASTER_ADDR": ADDRESSES[0]}

    def vanish(self, number: int) -> None:
        """Take the link down: no packet and no reset comes from it any more."""
        _ip(*self.inside(number)[1:], "ip", "link", "set", self.cards[number], "down")


def reason_against() -> str:
    """Why this machine has no network namespaces to offer; empty if it has."""
    if shutil.which("ip") is None:
        return "there is no program `ip`"
    try:
        with machines():
            return ""
    except (subprocess.CalledProcessError, OSError) as error:
        return f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}"


@contextmanager
def machines() -> Iterator[Machines]:
    """Two machines, which are gone at the end."""
    made = Machines()
    try:
        for name in made.names:
            _ip("netns", "add", name)
        _ip("link", "add", made.cards[0], "type", "veth", "peer", "name", made.cards[1])
        for number, (name, card) in enumerate(zip(made.names, made.cards, strict=True)):
            _ip("link", "set", card, "netns", name)
            _ip("-n", name, "address", "add", f"{ADDRESSES[number]}/24", "dev", card)
            _ip("-n", name, "link", "set", card, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", made.cards[0]], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
