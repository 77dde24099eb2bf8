"""`forge-run launch lighthouse`: the process by which groups of a job know of each other."""

from __future__ import annotations

import argparse
import math
import os
import signal
from typing import TYPE_CHECKING

from forge_core.cli.command_line import positive, with_examples
from forge_core.contracts.errors import ExitCode, ForgeError, JobError
from forge_plugin_torchft.secret import is_loopback

if TYPE_CHECKING:
    from torchft.coordination import LighthouseServer

ENDS = (signal.SIGINT, signal.SIGTERM)


HEADING = "train"


def command(argv: list[str]) -> int:
    """Run the quorum service of [parallel.torchft].

    It is the lighthouse of torchft, through which the groups of a job find each other.
    """
    parser = argparse.ArgumentParser("forge-run launch lighthouse", description=command.__doc__)
    add = parser.add_argument
    add("--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen at (loopback; [::] for all networks)")
    add("--trusted-network", action="store_true", help="only trusted machines reach --host, which has no secret")
    add("--port", type=positive, default=29510, metavar="N", help="port to listen at (29510)")
    add("--min-groups", type=positive, default=1, metavar="N", help="groups that make a quorum (1)")
    add("--dead-after", type=float, default=5.0, metavar="S", help="seconds without a heartbeat that mean death (5)")
    add("--join-within", type=float, default=60.0, metavar="S", help="seconds that a living group is waited for (60)")
    with_examples(parser, "forge-run launch lighthouse --port=29510 --dead-after=2")
    options = parser.parse_args(argv)
    if not all(0 < seconds < math.inf for seconds in (options.dead_after, options.join_within)):
        raise JobError("--dead-after and --join-within are finite seconds above 0")
    if not is_loopback(options.host) and not options.trusted_network:
        risk = "torchft's lighthouse has no secret, so whoever reaches it can join the groups and end them"
        raise JobError(f"--host={options.host}: {risk}; add --trusted-network if only machines that you trust reach it")
    # Before torchft, whose library reads it once: it reports each heartbeat in many lines
    os.environ.setdefault("RUST_LOG", "error")
    try:
        from torchft.coordination import LighthouseServer
    except ImportError as error:
        raise ForgeError(f"needs the package torchft: {error}; pip install 'torchft>=0.2,<0.3'") from error
    # Blocked, and waited for: a handler would not wake a thread that goes to sleep just as the signal arrives. The
    # server's threads inherit the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        server = _listen(LighthouseServer, options)
        # torchft gives the name of the machine, at which loopback may not be reached
        address = f"http://{options.host}:{options.port}" if is_loopback(options.host) else server.address()
        print(f"lighthouse = {address!r}  # also shows who is present, in a browser", flush=True)
        signal.sigwait(ENDS)
        server.shutdown()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return ExitCode.FINISHED


def _listen(server: type[LighthouseServer], options: argparse.Namespace) -> LighthouseServer:
    try:
        return server(
            bind=f"{options.host}:{options.port}",
            min_replicas=options.min_groups,
            join_timeout_ms=round(1000 * options.join_within),
            heartbeat_timeout_ms=round(1000 * options.dead_after),
            quorum_tick_ms=50,
        )
    except RuntimeError as error:
        raise ForgeError(f"the lighthouse cannot listen at {options.host}:{options.port}: {error}") from error
