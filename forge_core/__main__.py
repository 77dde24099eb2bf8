"""`forge-run`, and `python -m forge_core`: listens to signals, and then imports what takes time."""

import os
import signal
import sys


def main() -> int:
    """Run the command line of this process, and return the exit code."""
    # Before the first import of ours: attrs, the catalog and torch would else be interrupted with a traceback. `run`
    # puts `StopRequests` in place of this, other commands the defaults.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _end)
    from forge_core.cli import main as run_command_line

    return run_command_line()


def _end(number: int, _frame: object) -> None:
    os.write(2, f"forge-run: stopped by {signal.Signals(number).name} before anything was done\n".encode())
    os._exit(75)  # ExitCode.STOPPED, which is not imported yet


if __name__ == "__main__":
    sys.exit(main())
