"""The launcher or a benchmark in a process that has imported TensorFlow. Its Python programs are forked.

They behave like children started by `subprocess`: session, signals, exit codes, and workers die with the
launcher. `subprocess` starts other programs and those with different variables that imports read.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import types
import weakref
from collections.abc import Mapping

import warm_server

_MAX_DESCRIPTORS = 4096


def install(program: str, arguments: list[str], started_with: Mapping[str, str], installed: list[str]):
    """Makes the launcher or a script of tests/benchmarks/ fork; any other program starts processes.

    `started_with` are the initial variables of this process, `installed` the end of its sys.path.
    """
    _Child.started_with, _Child.installed = warm_server.read_by_imports(started_with), installed
    if warm_server.is_launcher(program, arguments):
        import ctl.launch.process as module

        module.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": _Child})
    elif os.path.basename(os.path.dirname(program)) == "benchmarks":
        subprocess.Popen = _Child  # `subprocess.run` uses it too


class _Child(subprocess.Popen):
    started_with: Mapping[str, str]
    installed: list[str]

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *remaining_arguments
    ):
        request = self._request(args, os.environ if env is None else env, cwd)
        if request is None:
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *remaining_arguments
            )
            return
        _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *options = remaining_arguments
        self.pid = os.fork()
        if self.pid == 0:
            if options[5]:
                os.setsid()
            _run(request, self.started_with, self.installed, (p2cread, c2pwrite, errwrite), preexec_fn)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _request(self, args, env, cwd) -> dict | None:
        """Returns the request as for `warm_server`, or None if the program has to be started."""
        first, second, *_ = [*map(os.fspath, args[1:]), "", ""]
        is_module = first == "-m" and (
            second.partition(".")[0] != "ctl" or warm_server.is_launcher(second, [*args[3:4]])
        )
        if args[0] != sys.executable or not (is_module or first == "-c" or first.endswith(".py")):
            return None
        if warm_server.read_by_imports(env) != self.started_with or warm_server.has_tensorflow_context():
            return None
        is_file = first.endswith(".py")
        return {
            "kind": "file" if is_file else first, "program": first if is_file else second,
            "arguments": [*map(os.fspath, args[2 if is_file else 3 :])], "env": dict(env),
            "cwd": os.fspath(cwd or os.getcwd()),
        }  # fmt: skip


def _run(request: dict, started_with: Mapping[str, str], installed: list[str], streams, preexec_fn) -> None:
    """Runs a program in this child. Does not return."""
    from ctl.io import exit_hook  # imported before the variables are replaced

    code = 1
    try:
        for number, stream in enumerate(streams):
            if stream != -1:  # else that of the parent
                os.dup2(stream, number)
        os.closerange(3, _MAX_DESCRIPTORS)
        if preexec_fn is not None:
            preexec_fn()
        _forget_the_parent()
        names = warm_server.become(request, installed)
        install(request["program"], request["arguments"], started_with, installed)
        program = warm_server.compile_program(request)
        exec(program, {"__name__": "__main__"} if request["kind"] == "-m" else names)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e, exit_hook.Exit):
            atexit.register(exit_hook._exit_process, code)  # as exit_hook does if it was not called
        if code and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
    except BaseException as e:
        with contextlib.suppress(SystemExit):
            sys.excepthook(type(e), e.with_traceback(e.__traceback__.tb_next), e.__traceback__)
    finally:
        ctypes.pythonapi.Py_Exit(code)  # ends as the interpreter ends, below frames of the parent


def _forget_the_parent() -> None:
    """Resets signals and streams as in a new process. The launcher's threads may use its streams.

    The parent's temporary directories are not deleted at the end of this process.
    """
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        options = {"closefd": False, "errors": "backslashreplace"} if number == 2 else {"closefd": False}
        stream = open(number, "w" if number else "r", **options)  # noqa: SIM115
        if number:
            stream.reconfigure(write_through=True, line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
