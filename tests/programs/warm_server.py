"""A process that has TensorFlow imported, and forks one child for each program that a test starts.

    python warm_server.py DESCRIPTOR

The import takes seconds of CPU, of which a child needs none. The server makes no TensorFlow context and
runs no program itself. What a child gets is that of a fresh `python program.py`: environment, arguments,
directory, sys.path, standard streams and seeds. It leaves `serve` and ends as the interpreter ends.
`processes.py` is the other side.
"""

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys
import types
from importlib import invalidate_caches
from importlib.machinery import BuiltinImporter, SourceFileLoader

# none that changes the environment: a child has that of its request
IMPORTS = ("tensorflow", "keras", "ctl.app", "ctl.keras.fit", "ctl.metrics.tensorboard")
MAX_REQUEST_BYTES = 2**20
CODE = struct.Struct("!i")  # of the process id, then of the exit code as subprocess has it


def import_all() -> None:
    before = {*os.environ, "TF_CPP_MIN_LOG_LEVEL"}
    import ctl  # noqa: F401  # hides TensorFlow's start-up lines

    for name in IMPORTS:
        __import__(name)
    assert before >= set(os.environ), f"an import set {set(os.environ) - before}"
    from tensorflow.python.eager import context

    assert context._context is None, "an import made a TensorFlow context, which no child may share"


def serve(control: socket.socket) -> dict | None:
    """Forks until `control` is closed: then None. In a child, its request."""
    waiting = selectors.DefaultSelector()
    waiting.register(control, selectors.EVENT_READ)
    children: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a process: its id, its test
    while True:
        for key, _ in waiting.select():
            if key.fileobj is control:
                text, streams, *_ = socket.recv_fds(
                    control, MAX_REQUEST_BYTES, 4, socket.MSG_CMSG_CLOEXEC
                )
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
            elif isinstance(key.fileobj, int):  # ended; it stays a zombie until the test has been told
                waiting.unregister(key.fileobj)
                ended = os.waitid(os.P_PIDFD, key.fileobj, os.WEXITED | os.WNOWAIT)
                assert ended is not None
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                test = children[key.fileobj][1]
                with contextlib.suppress(OSError):  # the test has ended
                    test.sendall(CODE.pack(code))
                waiting.register(test, selectors.EVENT_READ, key.fileobj)
            else:  # the test knows
                waiting.unregister(key.fileobj)
                pid, test = children.pop(key.data)
                os.waitpid(pid, 0)
                os.close(key.data)
                test.close()


def become(request: dict, installed: list[str]) -> dict:
    """Makes this child what a fresh process would be; the names that its program runs with."""
    import tempfile

    import numpy as np

    if request["start_new_session"]:
        os.setsid()
    *streams, test = request["streams"]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    with socket.socket(fileno=test) as connection:
        connection.sendall(CODE.pack(os.getpid()))  # it has a session of its own: the test may go on
    os.chdir(request["cwd"])
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL")  # set by `import ctl`, which a child does not repeat
    os.environ.clear()
    os.environ.update(request["env"])
    if level is not None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", level)
    np.random.seed()  # `random` has done so by itself
    tempfile.tempdir = None
    kind, program = request["kind"], request["program"]
    first = {"-c": "", "-m": os.getcwd(), "file": os.path.dirname(os.path.abspath(program))}[kind]
    sys.argv = ["-c" if kind == "-c" else program, *request["arguments"]]
    sys.orig_argv = [sys.executable, *([kind] if kind != "file" else []), program, *request["arguments"]]
    sys.path = [first, *request["env"]["PYTHONPATH"].split(os.pathsep), *installed]
    sys.path_importer_cache.clear()
    invalidate_caches()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    names = vars(main)
    names.update(__builtins__=__builtins__, __annotations__={}, __loader__=BuiltinImporter)
    if kind == "file":
        names.update(__file__=program, __cached__=None, __loader__=SourceFileLoader("__main__", program))
    return names


def compiled(request: dict) -> types.CodeType:
    """The program; of a module, the line that runs it as `python -m` does."""
    program = request["program"]
    if request["kind"] == "file":
        with open(program, "rb") as file:
            return compile(file.read(), program, "exec", dont_inherit=True)
    if request["kind"] == "-m":
        program = f"import runpy\nrunpy._run_module_as_main({program!r})"
    return compile(program, "<string>", "exec", dont_inherit=True)


if __name__ == "__main__":
    # Ctrl-C is for the tests, which then close the socket; a child gets what was sent before it began
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    found = sys.path[2:]  # without this file's folder and PYTHONPATH, the root
    import_all()
    gc.collect()
    gc.freeze()  # a child's collections copy no page of what was imported
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        os._exit(0)
    names = become(request, found)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    code = compiled(request)
    exec(code, {"__name__": "__main__"} if request["kind"] == "-m" else names)
