"""A process that has imported TensorFlow and forks one child for each program that a test starts.

    python warm_server.py DESCRIPTOR

The import takes seconds of CPU, which a child saves. The server creates no TensorFlow context and
runs no program itself. A child has the state of a fresh `python program.py`: environment, arguments,
directory, sys.path, standard streams and seeds. It leaves `serve` and ends as the interpreter ends.
Its command and variables are in /proc/<pid>/cmdline and environ too, if there is enough room.
`processes.py` is the client. The launcher and benchmarks fork their children: `warm_launcher.py`.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys
import types
from collections.abc import Mapping, Sequence
from importlib import invalidate_caches
from importlib.machinery import BuiltinImporter, SourceFileLoader

# none of them changes the environment: a child has the environment of its request
IMPORTS = ("tensorflow", "keras", "ctl.app", "ctl.keras.fit", "ctl.metrics.tensorboard")
MAX_REQUEST_BYTES = 2**20
# read while Python, NumPy, TensorFlow, Keras and gRPC are imported
_READ_BY_IMPORTS = (
    "ABSL_", "CUDA_", "GRPC_", "HOME", "KERAS_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NPY_",
    "OMP_", "OPENBLAS_", "PROTOCOL_BUFFERS_", "PYTHON", "TF2_", "TF_", "TZ", "XLA_",
)  # fmt: skip
READ_LATER = {
    "TF_CONFIG", "TF_NUM_INTEROP_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PYTHONUNBUFFERED",
}  # fmt: skip
_ROOM = "ROOM_FOR_VARIABLES"  # of the server's environment, for those of its children
CODE = struct.Struct("!i")  # of the process id, then of the exit code in the format of subprocess


def read_by_imports(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that must be equal in the server and in a forked process."""
    return {k: v for k, v in environ.items() if k.startswith(_READ_BY_IMPORTS) and k not in READ_LATER}


def is_launcher(module: str, arguments: Sequence[str]) -> bool:
    """Returns whether `python -m MODULE ARGUMENTS` is `ctl launch`, `ctl sweep` or `ctlrun`."""
    if module == "ctl":
        return [*arguments[:1]] in (["launch"], ["sweep"])
    return module in ("ctl.launch", "ctl.launch.horovodrun_cli")


def with_room(command: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns the command and variables of a server, with room for those of its children."""
    return [*command, " " * 2**13], {**environ, _ROOM: " " * 2**16}


def import_all() -> None:
    before = set(os.environ)  # of a test process, which has imported ctl
    import ctl  # noqa: F401  # hides TensorFlow's start-up lines

    for name in IMPORTS:
        __import__(name)
    assert before >= set(os.environ), f"an import set {set(os.environ) - before}"
    assert not has_tensorflow_context(), "an import made a TensorFlow context, which no child may share"


def has_tensorflow_context() -> bool:
    from tensorflow.python.eager import context

    return context._context is not None


def serve(control: socket.socket) -> dict | None:
    """Forks until `control` is closed, then returns None. In a child, returns its request."""
    waiting = selectors.DefaultSelector()
    waiting.register(control, selectors.EVENT_READ)
    children: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a process: its id, its test
    while True:
        for key, _ in waiting.select():
            if key.fileobj is control:
                text, streams, *_ = socket.recv_fds(control, MAX_REQUEST_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
                if not text:
                    return None
                pid = os.fork()
                if pid == 0:
                    ours = [control.detach(), *(c.detach() for _, c in children.values()), *children]
                    waiting.close()
                    for descriptor in ours:
                        os.close(descriptor)
                    return {**json.loads(text), "streams": streams}
                test = socket.socket(fileno=streams.pop())
                for descriptor in streams:
                    os.close(descriptor)
                process = os.pidfd_open(pid)
                children[process] = pid, test
                waiting.register(process, selectors.EVENT_READ)
            elif isinstance(key.fileobj, int):  # ended; it stays a zombie until the test has the exit code
                waiting.unregister(key.fileobj)
                ended = os.waitid(os.P_PIDFD, key.fileobj, os.WEXITED | os.WNOWAIT)
                assert ended is not None
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                test = children[key.fileobj][1]
                with contextlib.suppress(OSError):  # the test has ended
                    test.sendall(CODE.pack(code))
                waiting.register(test, selectors.EVENT_READ, key.fileobj)
            else:  # the test has the exit code
                waiting.unregister(key.fileobj)
                pid, test = children.pop(key.data)
                os.waitpid(pid, 0)
                os.close(key.data)
                test.close()


def take_streams(request: dict) -> None:
    """Sets the session and the standard streams of a child of the server. Sends its id to the test."""
    if request["start_new_session"]:
        os.setsid()
    *streams, test = request["streams"]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    with socket.socket(fileno=test) as connection:
        connection.sendall(CODE.pack(os.getpid()))  # its session has started: the test can continue


def become(request: dict, installed: list[str]) -> dict:
    """Resets this child to the state of a fresh process. Returns the globals of its program."""
    import tempfile

    import numpy as np

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "PYTHONUNBUFFERED" not in request["env"]:  # the server runs with this variable
        sys.stdout.reconfigure(write_through=False, line_buffering=sys.stdout.isatty())
    gc.unfreeze = lambda: None  # at its end `ctl` inspects all objects except those of imports
    np.random.seed()  # `random` reseeds after a fork
    tempfile.tempdir = None
    form, program = request["kind"], request["program"]
    first = {"-c": "", "-m": os.getcwd(), "file": os.path.dirname(os.path.abspath(program))}[form]
    sys.argv = ["-c" if form == "-c" else program, *request["arguments"]]
    sys.orig_argv = [sys.executable, *([form] if form != "file" else []), program, *request["arguments"]]
    _show(sys.orig_argv, request["env"])
    sys.path = [first, *request["env"]["PYTHONPATH"].split(os.pathsep), *installed]
    sys.path_importer_cache.clear()
    invalidate_caches()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    names = vars(main)
    names.update(__builtins__=__builtins__, __annotations__={}, __loader__=BuiltinImporter)
    if form == "file":
        names.update(__file__=program, __cached__=None, __loader__=SourceFileLoader("__main__", program))
    return names


def _show(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Overwrites the command and variables of this process in /proc, which are those of the server."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    texts = command, [f"{k}={v}" for k, v in sorted(environ.items(), key=lambda item: len(item[1]))]
    for text, begin, end in zip(texts, fields[45:49:2], fields[46:50:2], strict=True):
        size = int(end) - int(begin)
        content = b"".join(os.fsencode(t) + b"\0" for t in text)[: size - 1]
        ctypes.memmove(int(begin), content.ljust(size, b"\0"), size)


def compile_program(request: dict) -> types.CodeType:
    """Compiles the program. For a module, compiles the line that runs it as `python -m` does."""
    program = request["program"]
    if request["kind"] == "file":
        with open(program, "rb") as file:
            return compile(file.read(), program, "exec", dont_inherit=True)
    if request["kind"] == "-m":
        program = f"import runpy\nrunpy._run_module_as_main({program!r})"
    return compile(program, "<string>", "exec", dont_inherit=True)


if __name__ == "__main__":
    del os.environ[_ROOM]
    sys.modules["warm_server"] = sys.modules["__main__"]
    import warm_launcher

    started_with = dict(os.environ)
    # Ctrl-C is for the tests, which then close the socket; a child receives signals sent before its start
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    installed = sys.path[2:]  # without this file's folder and PYTHONPATH, the root
    atexit.register(gc.freeze)  # runs last, so that the exit of a child traverses no objects
    import_all()
    gc.collect()
    gc.freeze()  # garbage collections of a child copy no page of imported objects
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        os._exit(0)
    take_streams(request)
    names = become(request, installed)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    warm_launcher.install(request["program"], request["arguments"], started_with, installed)
    code = compile_program(request)
    exec(code, {"__name__": "__main__"} if request["kind"] == "-m" else names)
