"""`python -m forge_core …` and `python -m pytest …`, started by tests, as forks of a process that has imported torch.

A process of `forge-run` takes 0.1 CPU seconds instead of 3.4 then: most of the cost of tests of launchers, signals and
kills. One of pytest takes half: its garbage collections skip all of torch, too. `install` replaces the step of
`subprocess.Popen` that forks and executes, so tests, and the launchers that they start, are written as for users. The
process is a child of the one that asked for it, has its own standard streams, directory, environment, session and
passed sockets, and runs the module's `__main__`.

It has no interpreter of its own from the start: the hash seed is that of its siblings, torch is there before the job is
read, nothing can hit it while it imports torch, and `/proc/PID/environ` is another process's. A test for which that
matters sets `REAL=1` in the environment; the processes below are then started by `exec` as well.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar, NamedTuple, NoReturn

import forge_pretend

REAL = "FORGE_TESTS_REAL_STARTS"
READ_AT_START = ("PYTHON", "OMP_", "KMP_", "MKL_", "GOMP_", "TORCH", "LD_", "MALLOC_", "GLIBC_", "CUDA")
"""Variables that interpreters and libraries read once: with other values than here, a process is started by `exec`."""
TAKEN_OVER = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCHELASTIC_", "TORCH_NCCL_")
"""Beginnings of those that a fork takes over all the same; the last two are read when a process joins its group."""
MODULES = (
    "broken_network",
    "forge_core",
    "forge_plugin_plan.doctor.rank",
    "forge_plugin_launch.spares",
    "forge_testing.pretend",
    "outcomes_of_lines",
    "prepares_often",
    "pytest",
    "torch.distributed.run",
)
MEASURED = {"COV_CORE_SOURCE", "COVERAGE_PROCESS_START"}
"""Variables by which pytest-cov measures processes, from their start on."""
MOST_DESCRIPTORS = 16
"""That a process may be started with, its standard streams included."""
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37

_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class Start(NamedTuple):
    """What `subprocess.Popen` was asked to start."""

    module: str
    arguments: Sequence[str]
    directory: str
    environment: dict[str, str]
    own_session: bool
    passed: Sequence[int] = ()
    """Descriptors beyond the standard streams, in ascending order."""


def install() -> None:
    """From here on, `subprocess` forks processes of `forge-run`."""
    subprocess.Popen._execute_child = _fork_or_execute  # type: ignore[attr-defined]


def prepare() -> None:
    """Start the process that others are forks of, which the first of them does otherwise: for those that measure."""
    if not _Template.below:
        _template().wait()


def _fork_or_execute(
    self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
    startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
    errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: int, own_session: bool,
    process_group: int,
) -> None:  # fmt: skip
    environment = dict(os.environ if env is None else env)
    module = _module_of(args)
    plain = (preexec_fn, executable, gid, gids, uid, umask, process_group, shell) == (None,) * 5 + (-1, -1, False)
    # A fork of tests inherits their autograd, which has no queue for a device that it adds
    late = module == "forge_testing.pretend" and _Template.below
    if late or not (plain and close_fds and module and _alike(environment)):
        _execute(
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
            own_session, process_group,
        )  # fmt: skip
        return
    options, arguments = args[1 : args.index("-m")], args[args.index("-m") + 2 :]
    if "-u" in options:
        environment["PYTHONUNBUFFERED"] = "1"
    directory = os.fspath(cwd or os.getcwd())
    start = Start(module, list(map(str, arguments)), directory, environment, own_session, sorted(pass_fds))
    streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
    self.pid = _fork_here(start, streams) if _Template.below else _template().fork(start, [*streams, *start.passed])
    self._child_created = True
    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _module_of(args: Any) -> str:
    """Returns the module of ours that a command line runs; empty for any other command."""
    if not isinstance(args, (list, tuple)) or "-m" not in args[1:3] or str(args[0]) != sys.executable:
        return ""
    options, (module, *_) = args[1 : args.index("-m")], (*args[args.index("-m") + 1 :], "")
    return module if module in MODULES and set(options) <= {"-u"} else ""


def _alike(environment: dict[str, str]) -> bool:
    def read(variables: Any) -> dict[str, str]:
        names = [name for name in variables if name.startswith(READ_AT_START) and not name.startswith(TAKEN_OVER)]
        return {name: variables[name] for name in names}

    same = read(environment) == read(os.environ) and not MEASURED & environment.keys()
    return REAL not in environment and same and not any(map(_changes_what_is_imported, _python_path(environment)))


def _python_path(environment: Mapping[str, str]) -> list[str]:
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _changes_what_is_imported(entry: str) -> bool:
    """Whether a folder on the path holds modules that a new process would import in place of those imported here."""
    if entry in _PATH_AT_START:
        return False
    names = {name.partition(".")[0] for name in (os.listdir(entry) if os.path.isdir(entry) else ())}
    return bool(names & {"sitecustomize", "usercustomize", *sys.modules})


_PATH_AT_START = _python_path(os.environ)
"""What the template has, too; a test may add to the variable later."""


class _Template:
    """The process that has imported torch, from the side of the tests."""

    below = False
    """Whether this process is itself a fork: then it forks itself, since children are to be its own."""

    set_by_imports: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], **quiet)
        theirs.close()
        self._socket, self._lock = ours, threading.Lock()
        atexit.register(self._close)

    def fork(self, start: Start, descriptors: Sequence[int]) -> int:
        """Start a process with standard streams and passed descriptors, as a child of this one; returns its pid."""
        message = json.dumps(start).encode()
        with self._lock:
            # The template's child forks and ends; what it leaves behind goes to the next ancestor that wants orphans
            wanted = ctypes.c_int()
            prctl = ctypes.CDLL(None).prctl
            prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(wanted), 0, 0, 0)
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [len(message).to_bytes(4, "big")], descriptors)
                self._socket.sendall(message)
                return int.from_bytes(_receive(self._socket, 4), "big")
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, wanted.value, 0, 0, 0)

    def wait(self) -> None:
        """Wait until it has imported torch."""
        with self._lock:
            self._socket.sendall(bytes(4))
            _receive(self._socket, 4)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


@cache
def _template() -> _Template:
    return _Template()


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise EOFError
        data += more
    return data


def _serve(connection: socket.socket) -> tuple[Start, list[int]] | None:
    """Fork for each request; returns one in the process that is to become it, and None at the end."""
    while True:
        size, descriptors, _, _ = socket.recv_fds(connection, 4, MOST_DESCRIPTORS)
        if not size:
            return None
        if not any(size):  # of `wait`
            connection.sendall(size)
            continue
        fields = json.loads(_receive(connection, int.from_bytes(size, "big")))
        told, telling = os.pipe()
        if (middle := os.fork()) == 0:
            gone, left = os.pipe()
            if os.fork():
                os._exit(0)
            os.close(left)
            os.read(gone, 1)  # until the process between has ended: only then is the parent the one that asked
            start = Start(*fields)
            if start.own_session:
                os.setsid()
            os.write(telling, os.getpid().to_bytes(4, "big"))
            return start, descriptors
        os.waitpid(middle, 0)
        connection.sendall(os.read(told, 4))
        for number in (*descriptors, told, telling):
            os.close(number)


def _fork_here(start: Start, streams: Sequence[int]) -> int:
    """Start a rank, as a fork of this process, which is one itself."""
    begun, beginning = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on, of a fork beside threads, on standard error, which tests read
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        os.close(beginning)
        os.read(begun, 1)
        os.close(begun)
        return child
    if start.own_session:
        os.setsid()
    atexit._clear()  # type: ignore[attr-defined]  # those of the launcher
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        # Not where everything that is installed lies below it, as in the repository: numpy is imported once a process
        if file.startswith(f"{start.directory}/") and not sys.prefix.startswith(f"{start.directory}/"):
            del sys.modules[name]  # a file of the job, which the launcher has imported to check it: imported anew
    _become(start, [*streams, *start.passed])
    return _run_and_end(start)


def _become(start: Start, descriptors: Sequence[int]) -> None:
    """Make this fork what a new process would be."""
    places = (0, 1, 2, *start.passed)
    # Out of the way first, since one of them may have the number of another one's place
    copies = [fcntl.fcntl(number, fcntl.F_DUPFD, places[-1] + 1) for number in descriptors]
    for place, copy in zip(places, copies, strict=True):
        os.dup2(copy, place)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in places:
            with suppress(OSError):  # that of the listing itself
                os.close(number)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    os.chdir(start.directory)
    direct = bool(start.environment.get("PYTHONUNBUFFERED"))
    sys.stdin, sys.stdout, sys.stderr = map(
        _stream, range(3), "rww", (sys.stdin, sys.stdout, sys.stderr), (direct,) * 3
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.argv[1:] = start.arguments
    entries = _python_path(os.environ)
    os.environ.clear()
    os.environ.update(_Template.set_by_imports | start.environment)
    others = [entry for entry in sys.path[1:] if entry not in entries]
    sys.path[:] = [start.directory, *_python_path(os.environ), *others]
    forge_pretend.load()  # torch, which calls it, was imported in another environment


def _stream(number: int, mode: str, old: Any, direct: bool) -> Any:
    options: dict[str, Any] = {"encoding": old.encoding, "errors": old.errors}
    if direct and mode == "w":  # as `python -u`: without a buffer, and not only with one that passes text on
        file = os.fdopen(number, "wb", buffering=0, closefd=False)
        return io.TextIOWrapper(file, **options, write_through=True)  # type: ignore[arg-type]
    return os.fdopen(number, mode, buffering=1 if number == 2 else -1, closefd=False, **options)


def _run_and_end(start: Start) -> NoReturn:
    """Run the module, and end as an interpreter does, but for freeing all modules: with torch, that takes 0.2 s."""
    code: Any = 1
    interrupted = False
    try:
        runpy.run_module(start.module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        interrupted = isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it any more
            code = 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _main() -> None:
    import catalogs

    from forge_testing.processes import IMPORTED, prepare_to_fork
    from forge_testing.torch_internals import record_no_stacks

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt from the terminal is for the tests
    before = dict(os.environ)
    for name in ("forge_core.cli.run", *IMPORTED):
        importlib.import_module(name)
    catalogs.install()
    prepare_to_fork()
    record_no_stacks()
    _Template.set_by_imports = {name: value for name, value in os.environ.items() if name not in before}
    _forget_ends_of_torch()
    gc.collect()
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        install_below()
        _become(*request)
        _run_and_end(request[0])


def _forget_ends_of_torch() -> None:
    """Leave out what torch does when an interpreter ends, a third of the CPU time of a short run.

    It unregisters its operators one by one, and makes a table of compile times for a log that nobody reads.
    """
    import torch._dynamo.utils

    atexit.unregister(torch._dynamo.utils.dump_compile_times)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def install_below() -> None:
    """In a fork: the processes of `forge-run` that it starts are forks of it."""
    _Template.below = True
    install()


if __name__ == "__main__":
    _main()
