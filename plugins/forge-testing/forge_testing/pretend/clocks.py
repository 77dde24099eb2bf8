"""Who has waited for what: streams, events, and accesses to memory that are not ordered.

Work is done at once, in the order in which it is queued, so numbers are always as in a correct program. Each stream
counts its operations, and keeps how far it has waited for every other stream; so does the host. An access that depends
on another stream's operation, and for which nobody has waited, is an error here by the first run, where a real device
would be right most of the time.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from types import TracebackType
from typing import Any

from attrs import Factory, define, field

PATIENCE = 2
"""How often `Event.query` is False before it is True, so that code which polls must be able to wait."""

HOST = -1
"""The number of the host among the streams."""

Known = dict[int, int]
"""For each stream, its operation up to which somebody has waited."""


class PretendedError(RuntimeError):
    """What a real device might let pass, or compute wrong: memory that is used without an order, or devices mixed."""


def place() -> str:
    """File and line of the code that has called torch."""
    frame: Any = sys._getframe(1)
    while frame is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "somewhere in torch"


def _is_inside(filename: str) -> bool:
    parts = filename.replace("\\", "/")
    own = ("/torch/", "/torchao/", "/forge_testing/pretend/", "/contextlib.py", "/threading.py", "<")
    return any(part in parts for part in own)


def _merge(known: Known, other: Known) -> None:
    for stream, time in other.items():
        known[stream] = max(known.get(stream, 0), time)


@define(eq=False)
class Stream:
    """A queue of the device, as `torch.cuda.Stream`; operations on one are in order, those on two are not."""

    device: Any = None
    priority: int = 0
    stream_id: int = field(init=False)
    time: int = field(default=0, init=False)
    known: Known = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.stream_id = clocks.new_stream(self)

    @property
    def device_index(self) -> int:
        return 0

    def now(self) -> Known:
        """What has happened on this stream, and what it has waited for."""
        return {**self.known, self.stream_id: self.time}

    def launch(self) -> int:
        """Queue an operation; it may count on all that the host has waited for."""
        _merge(self.known, clocks.host)
        self.time += 1
        return self.time

    def wait_stream(self, other: Stream) -> None:
        _merge(self.known, other.now())

    def wait_event(self, event: Event) -> None:
        _merge(self.known, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        clocks.wait("stream", self.now())

    def __enter__(self) -> Stream:
        clocks.stack().append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        clocks.stack().pop()


class Event:
    """A mark in a stream, as `torch.cuda.Event`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.clock: Known = {}
        self._asked = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or clocks.current()
        _merge(stream.known, clocks.host)
        self.clock, self._asked = stream.now(), 0

    def wait(self, stream: Stream | None = None) -> None:
        (stream or clocks.current()).wait_event(self)

    def query(self) -> bool:
        self._asked += 1
        if self._asked > PATIENCE:
            clocks.arrive(self.clock)
        return self._asked > PATIENCE

    def synchronize(self) -> None:
        clocks.wait("event", self.clock)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds: a thousandth for each operation between the two."""
        return max(0, sum(end.clock.values()) - sum(self.clock.values())) / 1000


@define(eq=False)
class Access:
    """The last operations on some memory: who wrote it, and who has read it since."""

    born: int
    """The stream on which it was allocated; `HOST` for pinned memory."""
    writer: tuple[int, int, str] | None = None
    readers: dict[int, tuple[int, str]] = Factory(dict)
    kept_for: set[int] = Factory(set)
    """Streams named by `record_stream`: freed memory is not used again before they are through."""

    def read(self, stream: Stream, time: int, where: str) -> None:
        if self.writer is not None:
            self._ordered(stream.known, self.writer, stream.stream_id, "read", where)
        self.readers[stream.stream_id] = time, where

    def write(self, stream: Stream, time: int, where: str) -> None:
        if self.writer is not None:
            self._ordered(stream.known, self.writer, stream.stream_id, "written", where)
        for reader, (when, there) in self.readers.items():
            self._ordered(stream.known, (reader, when, there), stream.stream_id, "written", where)
        self.writer, self.readers = (stream.stream_id, time, where), {}

    def read_on_host(self) -> None:
        """Raises if a copy from the device into this memory may not have arrived."""
        if self.writer is not None:
            self._ordered(clocks.host, self.writer, HOST, "read", "")

    def written_on_host(self) -> None:
        """Raises if the device may still read or write this memory."""
        for reader, (when, there) in self.readers.items():
            self._ordered(clocks.host, (reader, when, there), HOST, "written", "")
        self.read_on_host()
        self.writer, self.readers = None, {}

    @staticmethod
    def _ordered(known: Known, use: tuple[int, int, str], stream: int, doing: str, where: str) -> None:
        other, time, there = use
        if other in (stream, HOST) or known.get(other, 0) >= time:
            return
        who = "the host" if stream == HOST else f"stream {stream}"
        raise PretendedError(
            f"{where or place()}: memory is {doing} by {who} while stream {other} may still use it"
            f"{', by ' + there if there else ''}; wait for its event, or let this stream wait for that one"
        )

    def freed(self) -> None:
        """Keep in mind which other streams may still use the memory, which its own stream can get for something new."""
        uses = dict(self.readers)
        if self.writer is not None:
            uses.setdefault(self.writer[0], self.writer[1:])
        for stream, (time, where) in uses.items():
            if stream not in (self.born, HOST) and stream not in self.kept_for:
                clocks.loose.setdefault(self.born, []).append((stream, time, where))


class Clocks:
    """The streams of this process, what the host has waited for, and how often and where it waited."""

    def __init__(self) -> None:
        self.streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self.host: Known = {}
        self.loose: dict[int, list[tuple[int, int, str]]] = {}
        """For each stream, uses by others of memory that it has freed."""
        self.waits: Counter[tuple[str, str]] = Counter()
        """How often the host waited, by (what for, file and line). Waits for an event or stream are not in it."""
        self.default: Stream
        """The one that is current where a thread has chosen none; made last, as streams are numbered by this."""
        self._threads = threading.local()
        self._lock = threading.Lock()
        self._count = 0

    def new_stream(self, stream: Stream) -> int:
        with self._lock:
            number, self._count = self._count, self._count + 1
        self.streams[number] = stream
        return number

    def stack(self) -> list[Stream]:
        """The current streams of this thread, innermost last."""
        found: list[Stream] | None = getattr(self._threads, "stack", None)
        if found is None:
            found = self._threads.stack = [self.default]
        return found

    def current(self) -> Stream:
        return self.stack()[-1]

    def arrive(self, known: Known) -> None:
        """The host has waited for this."""
        with self._lock:
            _merge(self.host, known)

    def wait(self, reason: str, known: Known | None = None) -> None:
        """The host waits, for the current stream unless told otherwise; counted if it waits for a value."""
        self.arrive(self.current().now() if known is None else known)
        if known is None:
            self.waits[reason, place()] += 1

    def allocate(self) -> int:
        """The current stream gets memory, perhaps what was freed.

        Raises:
            PretendedError: another stream may still use what was freed, and nobody has waited for it.
        """
        stream = self.current()
        for other, time, where in self.loose.pop(stream.stream_id, ()):
            if max(self.host.get(other, 0), stream.known.get(other, 0)) < time:
                raise PretendedError(
                    f"{where or place()}: memory of stream {stream.stream_id} was freed, and {place()} may get it "
                    f"while stream {other} still uses it; call record_stream, or keep the tensor until this stream "
                    "has waited"
                )
        return stream.stream_id


clocks = Clocks()
clocks.default = Stream()
