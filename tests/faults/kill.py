"""Kills training runs at random moments, and sees whether they end as if nobody had.

    python tests/faults/kill.py --kills 1000 --record kills.json

Adds to the record until it has so many kills; give the same command to go on. Exits with 1 if any trial of the record
ever failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from harness.campaign import Campaign
from harness.record import Record
from harness.scenarios import scenarios

from forge_core import Catalog


def main() -> int:
    """Run one command line; returns the exit code."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    known = scenarios(Catalog.installed())
    chosen = [known[name] for name in options.scenario] or list(known.values())
    record = Record(options.record)
    campaign = Campaign(chosen, record, options.record.absolute().with_suffix(".runs"), options.seed, say)
    try:
        campaign.run(options.kills, options.jobs)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on")
    say(f"\n{record.table(known.values())}\n\n{record.summary()}")
    for failure in record.failures:
        say(f"FAILED {failure['trial']}: {failure['folder']}\n    {failure['problems'][0]}")
    return 1 if record.failures else 0


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, required=True, help="how many the record shall have, of all scenarios")
    parser.add_argument("--record", type=Path, required=True, help="file of JSON; runs are made in a folder beside it")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time (default 2); best the number of cores")
    parser.add_argument("--seed", type=int, default=0, help="another seed plans other kills")
    parser.add_argument("--scenario", action="append", default=[], metavar="NAME", help="only this; may be repeated")
    return parser.parse_args()


def say(line: str) -> None:
    """Print at once, for those who read a file while it is written."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
