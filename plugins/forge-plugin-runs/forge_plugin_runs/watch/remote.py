"""A run on another host, read through one `ssh` connection: `tail -F` of its metrics, and its lock, job and logs.

The host needs a POSIX shell and nothing of Forge. The script is sent by standard input, so that no shell has to
quote it; the lines that it prints itself begin with `@`.
"""

from __future__ import annotations

import queue
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

SCRIPT = r"""
cd "$1" || exit 3
[ -f job.toml ] || [ -f .lock ] || { echo "$1 is no run folder" >&2; exit 3; }
look() {
  if [ ! -f .lock ]; then state=free
  elif ! command -v flock >/dev/null 2>&1; then state=unknown
  elif flock -n -s .lock true; then state=free
  else state=held
  fi
  printf '@now %s\n@lock %s %s\n' "$(date +%s)" "$state" "$(date -r .lock +%s 2>/dev/null || echo 0)" || return 1
  for log in logs/rank-*.log; do
    [ -s "$log" ] && printf '@log %s %s %s\n' "$log" "$(date -r "$log" +%s)" "$(tail -n 1 "$log" | cut -c 1-300)"
  done
  return 0
}
sed 's/^/@job /' job.toml 2>/dev/null
[ "$3" = once ] && { tail -c "$2" metrics.jsonl 2>/dev/null; look; exit 0; }
# A closed connection shows as an error of printf, and not as a signal that would leave tail behind
trap '' PIPE
tail -c "$2" -F metrics.jsonl 2>/dev/null &
while look; do sleep 5; done
kill $!
"""
WINDOW = 16_000_000
"""Bytes of the metrics that are sent first."""
AGAIN_S = 10.0
"""Seconds after which a connection that ended is opened again."""


class RemoteLines:
    """Lines of the script on a host. A connection that ends is opened again, and sends the window once more."""

    def __init__(self, host: str, folder: str, *, once: bool = False) -> None:
        self._command = command(host, folder, once)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._words: IO[bytes]
        """What the process of the last start has written to standard error."""
        self._reader: threading.Thread | None = None
        self._ended = float("-inf")
        self._once = once
        self.problem = ""
        """Why there is no connection; empty while there is one."""

    def lines(self) -> list[bytes]:
        """Returns the lines since the last call; with `once`, waits for all of them."""
        if self._process is None and time.monotonic() - self._ended >= AGAIN_S:
            self._start()
        # The script ends after one picture, and only then all of its lines are there
        if self._once and self._reader is not None:
            self._reader.join()
        taken = list[bytes]()
        with suppress(queue.Empty):
            while True:
                taken.append(self._lines.get_nowait())
                self.problem = ""  # there is a connection again
        if self._process is not None and self._reader is not None and not self._reader.is_alive():
            self._note_end()
        return taken

    def close(self) -> None:
        """End the connection."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _start(self) -> None:
        # A file and not a pipe: what ssh writes there is read when it has ended, and a full pipe would stop it
        self._words, pipe = tempfile.TemporaryFile(), subprocess.PIPE  # noqa: SIM115
        try:
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=self._words)
        except OSError as error:
            self._words.close()
            self.problem, self._ended = f"ssh cannot be started: {error.strerror}", time.monotonic()
            return
        # A daemon thread: a connection that hangs must not keep the command from ending
        self._reader = threading.Thread(target=self._read, args=[self._process], daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        # ssh may end before it has read the script, as for an unknown host
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(SCRIPT.encode())
        for line in process.stdout:
            self._lines.put(line.rstrip(b"\n"))

    def _note_end(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        self._words.seek(0)
        with self._words:
            words = self._words.read().decode(errors="replace").strip().splitlines()
        # Without `once`, the script does not end while the run is watched: exit code 0 is a problem too
        if code or not self._once:
            self.problem = f"ssh ended with exit code {code}" + (f": {words[-1]}" if words else "")
        self._process, self._ended = None, time.monotonic()


def command(host: str, folder: str, once: bool) -> Sequence[str]:
    """Returns the command line: `ssh HOST sh -s -- FOLDER BYTES [once]`."""
    folder = folder.removeprefix("~/") or "."  # ssh begins in the home folder; quoted, `~` would be a name
    return ["ssh", host, f"sh -s -- {shlex.quote(folder)} {WINDOW}{' once' if once else ''}"]
