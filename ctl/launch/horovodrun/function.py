"""`hvd.run`: calls a function on several processes, and returns what each returned.

results = run(train, args=(0.01,), np=2)       # [of rank 0, of rank 1]
"""

import os
import pickle
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctl.errors import CtlError, UsageError
from ctl.launch.horovodrun import call, elastic_options, options, static
from ctl.launch.horovodrun.command import job_of
from ctl.launch.horovodrun.config_file import NO_MPI
from ctl.launch.horovodrun.host_allocation import hosts_of, refuse_far, seats
from ctl.launch.horovodrun.jobs import lost_a_peer
from ctl.launch.horovodrun.options import Asked

# What `run` takes beside the function, as horovod.run does, and the options that say the same.
_OPTIONS = {
    "num_proc": "num_proc", "hosts": "hosts", "hostfile": "hostfile",
    "start_timeout": "start_timeout", "ssh_port": "ssh_port",
    "ssh_identity_file": "ssh_identity_file", "output_filename": "output_filename",
    "verbose": "verbose", "min_num_proc": "min_num_proc", "min_np": "min_num_proc",
    "max_num_proc": "max_num_proc", "max_np": "max_num_proc", "reset_limit": "reset_limit",
    "cooldown_range": "cooldown", "host_discovery_script": "host_discovery_script", "slots": "slots",
}  # fmt: skip
_ACCEPTED = ("disable_cache", "use_gloo", "mpi_args", "network_interface", "network_interfaces")


class RankError(CtlError, RuntimeError):
    """The function failed on a rank; the message ends with the traceback there."""


def run(
    func: Callable, args: Sequence = (), kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None, *, np: int | None = None, executable: str | None = None,
    **asked: Any,
) -> list:  # fmt: skip
    """Calls `func(*args, **kwargs)` on `np` processes of this machine; returns their results by rank.

    Args:
      func: a function of a module goes by its name, any other by cloudpickle; both through files in a
        directory that is closed to other users.
      num_proc, np: how many processes, 1 by default; executable: a Python, by default this one.
      asked: `hosts`, `hostfile`, `start_timeout`, `output_filename`, `verbose`, and for elastic jobs
        `min_np`, `max_np`, `reset_limit`, `cooldown_range`, `host_discovery_script`, `slots`, as
        options of ctlrun; further names of horovod.run are accepted.

    Call it in the main thread. Raises RankError, with the rank and its traceback, if one fails; and
    UsageError for what cannot be used, such as hosts other than this one.
    """
    given = _checked({**asked, "num_proc": np if num_proc is None else num_proc})
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("run() was called in a thread; call it in the main thread.")
    directory = Path(tempfile.mkdtemp(prefix="ctl-run-"))  # mode 0700
    try:
        _write(directory / call.ASKED, func, tuple(args), dict(kwargs or {}))
        words = [executable or sys.executable, "-m", "ctl.launch.horovodrun.call", str(directory)]
        return _results(directory, *_started(given, words))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _checked(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ctlrun that say the same; UsageError for names and values that cannot be."""
    given = options.nothing()
    if asked.get("use_mpi"):
        raise UsageError(f"use_mpi=True came; {NO_MPI}")
    for name, value in asked.items():
        if value is None:
            continue
        if name in _OPTIONS:
            given[_OPTIONS[name]] = value
        elif name not in (*_ACCEPTED, "use_mpi"):
            known = ", ".join(_OPTIONS)
            raise TypeError(f"run() got an unknown argument {name!r}; expected some of {known}.")
    given["num_proc"] = 1 if given["num_proc"] is None else int(given["num_proc"])
    return given


def _write(path: Path, func: Callable, args: tuple, kwargs: dict) -> None:
    try:
        data = pickle.dumps((func, args, kwargs))
        if b"__main__" in data:  # which is another program over there
            raise pickle.PicklingError("it belongs to __main__")
    except Exception as e:
        data = _by_value(func, args, kwargs, e)
    with open(path, "wb") as file:
        pickle.dump([p or os.getcwd() for p in sys.path], file)
        file.write(data)


def _by_value(func: Callable, args: tuple, kwargs: dict, why: Exception) -> bytes:
    name = getattr(func, "__qualname__", repr(func))
    try:
        import cloudpickle
    except ImportError:
        raise UsageError(
            f"{name} cannot be passed on by its name ({why}); write it into a module of its own, or "
            "`pip install cloudpickle`"
        ) from None
    try:
        return cloudpickle.dumps((func, args, kwargs))
    except Exception as e:
        raise UsageError(
            f"{name} or its arguments cannot be passed to other processes: {e}"
        ) from None


def _own_path() -> str:
    """A PYTHONPATH with which the processes find `ctl` where this process has it."""
    own, before = str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")
    return os.pathsep.join([own, *([before] if before else [])])


def _started(given: Asked, words: list[str]) -> tuple[list[int], int]:
    """Runs the job: the numbers of its processes by rank, and its exit code."""
    more = {"PYTHONPATH": _own_path()}
    if elastic_options.is_asked(given):
        driver = elastic_options.driver_of(given, job_of(given, words, 0, more), is_near=True)
        exit_code = driver.run()
        return [number for _, number in sorted(driver.done)], exit_code
    places = seats(hosts_of(given), given["num_proc"])
    refuse_far(seat.host for seat in places if seat.far)
    exit_code = static.run(job_of(given, words, len(places), more), places)
    return list(range(len(places))), exit_code


def _results(directory: Path, numbers: Sequence[int], exit_code: int) -> list:
    """What the processes returned, in this order."""
    found = {
        int(path.suffix[1:]): pickle.loads(path.read_bytes())
        for path in directory.glob("result.*")
        if path.suffix[1:].isdigit()
    }
    failed = [(number, said) for number, (is_good, said) in found.items() if not is_good]
    # One that lost a peer says so; the peer is the one to be named.
    failed.sort(key=lambda one: (lost_a_peer(one[1].rstrip().rpartition("\n")[2]), one))
    if exit_code and failed:
        number, said = failed[0]
        raise RankError(f"the function failed on rank {number}:\n{said}")
    if exit_code or not set(numbers) <= set(found):
        missing = next((number for number in numbers if number not in found), None)
        which = "a process" if missing is None else f"rank {missing}"
        raise RankError(
            f"{which} ended without a result; the job's exit code is {exit_code} and what it said is on "
            "stderr"
        )
    return [found[number][1] for number in numbers]
