"""Execution of a function on several processes, with the results by rank: `hvd.run`.

    results = run(train, args=(0.01,), np=2)       # [of rank 0, of rank 1]

Each process runs `python -m ctl.launch.run_function DIRECTORY`. The directory belongs to the process that
started it, other users have no access, and only the two processes write to it. Therefore pickles are read
from this directory, and from no other.
"""

import os
import pickle
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctl.errors import EXIT_DONE, EXIT_FAILED, CtlError, UsageError
from ctl.launch.horovodrun_cli import (
    build_elastic_job,
    build_rank_job,
    check_hosts_are_local,
    parse_host_options,
    requests_elastic_job,
)
from ctl.launch.horovodrun_options import Options, no_options
from ctl.launch.host_allocation import allocate_ranks
from ctl.launch.rank_job import reports_lost_peer, run_ranks

# The arguments of `run` besides the function, as in horovod.run, that are options of ctlrun.
_ARGUMENTS = (
    "num_proc", "hosts", "hostfile", "start_timeout", "ssh_port", "ssh_identity_file",
    "output_filename", "verbose", "min_num_proc", "max_num_proc", "reset_limit",
    "host_discovery_script", "slots",
)  # fmt: skip
_RENAMED = {"min_np": "min_num_proc", "max_np": "max_num_proc", "cooldown_range": "cooldown"}
_IGNORED = ("disable_cache", "use_gloo", "mpi_args", "network_interface", "network_interfaces")
_CALL = "call"  # the file with (function, args, kwargs)


class RankError(CtlError, RuntimeError):
    """Failure of the function on a rank. The message ends with the traceback of the rank."""


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    executable: str | None = None,
    **options: Any,
) -> list[Any]:
    """Calls `func(*args, **kwargs)` on `np` processes of this machine. Returns their results by rank.

    Args:
      func: A function of a module is passed by name, any other by cloudpickle; both through files
        in a directory without access for other users.
      args: Positional arguments of the function.
      kwargs: Keyword arguments of the function.
      num_proc: Number of processes, default 1.
      np: Another name of `num_proc`.
      executable: Python interpreter, by default the current one.
      **options: `hosts`, `hostfile`, `start_timeout`, `output_filename`, `verbose`, and for elastic jobs
        `min_np`, `max_np`, `reset_limit`, `cooldown_range`, `host_discovery_script`, `slots`, as
        options of ctlrun. Further names of horovod.run are ignored.

    Call it in the main thread. Raises RankError, with the rank and its traceback, if a rank fails, and
    UsageError for invalid arguments, such as hosts other than this one.
    """
    checked = _check_arguments({**options, "num_proc": np if num_proc is None else num_proc})
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("run() was called in another thread; call it in the main thread.")
    directory = Path(tempfile.mkdtemp(prefix="ctl-run-"))  # mode 0700
    try:
        _write_call(directory / _CALL, func, tuple(args), dict(kwargs or {}))
        command = [executable or sys.executable, "-m", "ctl.launch.run_function", str(directory)]
        return _collect_results(directory, *_run_processes(checked, command))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _check_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of ctlrun for these arguments. Raises UsageError for invalid values."""
    options = no_options()
    if arguments.get("use_mpi"):
        raise UsageError(
            "run() got use_mpi=True, but it starts its processes without mpirun; omit the argument, or "
            "start a script with `ctlrun --mpi`"
        )
    for name, value in arguments.items():
        if value is None:
            continue
        if name in _ARGUMENTS or name in _RENAMED:
            options[_RENAMED.get(name, name)] = value
        elif name not in (*_IGNORED, "use_mpi"):
            argument_names = ", ".join([*_ARGUMENTS, *_RENAMED])
            raise TypeError(f"run() got an unexpected argument {name!r}; expected one of {argument_names}.")
    options["num_proc"] = 1 if options["num_proc"] is None else int(options["num_proc"])
    return options


def _write_call(
    path: Path, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        data = pickle.dumps((func, args, kwargs))
        if b"__main__" in data:  # `__main__` is another program in the new process
            raise pickle.PicklingError("it is defined in __main__")
    except Exception as e:
        data = _pickle_by_value(func, args, kwargs, e)
    with open(path, "wb") as file:
        pickle.dump([p or os.getcwd() for p in sys.path], file)
        file.write(data)


def _pickle_by_value(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], pickling_error: Exception
) -> bytes:
    name = getattr(func, "__qualname__", repr(func))
    try:
        import cloudpickle
    except ImportError:
        raise UsageError(
            f"{name} cannot be pickled by name ({pickling_error}); move it to a module that other "
            "processes can "
            "import, or run `pip install cloudpickle`"
        ) from None
    try:
        return bytes(cloudpickle.dumps((func, args, kwargs)))
    except Exception as e:
        raise UsageError(f"{name} or its arguments cannot be passed to other processes: {e}") from None


def _run_processes(options: Options, command: list[str]) -> tuple[list[int], int]:
    """Runs the job. Returns the numbers of its processes by rank, and its exit code."""
    package_dir, python_path = str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")
    environ = {
        "PYTHONPATH": os.pathsep.join([package_dir, *([python_path] if python_path else [])])
    }  # to find `ctl`
    if requests_elastic_job(options):
        job = build_elastic_job(options, build_rank_job(options, command, 0, environ), local_only=True)
        exit_code = job.run()
        return [number for _, number in sorted(job.completed_workers)], exit_code
    placement = allocate_ranks(parse_host_options(options), options["num_proc"])
    check_hosts_are_local(placement.remote.values())
    exit_code = run_ranks(build_rank_job(options, command, len(placement.tasks), environ), placement)
    return list(range(len(placement.tasks))), exit_code


def _collect_results(directory: Path, numbers: Sequence[int], exit_code: int) -> list[Any]:
    """Returns the results of the processes in this order."""
    result_by_number = {
        int(path.suffix[1:]): pickle.loads(path.read_bytes())
        for path in directory.glob("result.*")
        if path.suffix[1:].isdigit()
    }
    failed = [
        (number, text) for number, (has_succeeded, text) in result_by_number.items() if not has_succeeded
    ]
    # Sorts errors about a lost peer last, because the peer's own error is the cause.
    failed.sort(key=lambda entry: (reports_lost_peer(entry[1].rstrip().rpartition("\n")[2]), entry))
    if exit_code and failed:
        number, text = failed[0]
        raise RankError(f"the function failed on rank {number}:\n{text}")
    if exit_code or not set(numbers) <= set(result_by_number):
        missing = next((number for number in numbers if number not in result_by_number), None)
        which = "a process" if missing is None else f"rank {missing}"
        raise RankError(
            f"{which} ended without a result; the job's exit code is {exit_code}, and its error is on "
            "stderr"
        )
    return [result_by_number[number][1] for number in numbers]


def call_function(argv: list[str]) -> int:
    """Runs the function in one process. The exit code indicates its success."""
    directory = Path(argv[0])
    number = int(os.environ.get("CTL_HVD_WORKER") or os.environ["HOROVOD_RANK"])
    try:
        with open(directory / _CALL, "rb") as file:
            paths = pickle.load(file)
            sys.path[:] = [*paths, *(p for p in sys.path if p not in paths)]
            function, args, kwargs = pickle.load(file)
        result: tuple[bool, Any] = (True, function(*args, **kwargs))
    except BaseException as e:
        if isinstance(e, SystemExit) and e.code in (None, 0):
            result = (True, None)
        else:
            traceback.print_exc()
            result = (False, traceback.format_exc())
    try:
        data = pickle.dumps(result)
    except Exception as e:
        came = type(result[1]).__name__
        result = (False, f"the return value, of type {came}, cannot be pickled: {e}\n")
        data = pickle.dumps(result)
    new = directory / f"result.{number}.new"
    new.write_bytes(data)
    new.replace(directory / f"result.{number}")
    return EXIT_DONE if result[0] else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(call_function(sys.argv[1:]))
