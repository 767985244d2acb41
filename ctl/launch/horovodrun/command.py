"""The `ctlrun` command: reads the line, checks it, and runs the job."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ctl.errors import EXIT_DONE, UsageError
from ctl.io.console import quoted
from ctl.launch.horovodrun import builds, config_file, elastic_options, options, static
from ctl.launch.horovodrun.console import say
from ctl.launch.horovodrun.environment import asked_for, for_far_hosts
from ctl.launch.horovodrun.heartbeats import TIMEOUT_SECS
from ctl.launch.horovodrun.host_allocation import hosts_of, seats
from ctl.launch.horovodrun.jobs import Job
from ctl.launch.horovodrun.options import Asked
from ctl.launch.horovodrun.output import Output
from ctl.launch.ssh import Door
from ctl.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `ctlrun` with these words, by default those of the line, and returns its exit code.

    What cannot be used is one sentence on stderr and exit code 2.
    """
    try:
        asked, command = options.read(list(sys.argv[1:] if argv is None else argv))
        told = _about(asked)
        if told:
            print(told)
            return EXIT_DONE
        if asked["config_file"]:
            config_file.add(asked, asked["config_file"])
        _check(asked, command)
        return start(asked, command)
    except UsageError as e:
        say(str(e))
        return e.exit_code


def start(asked: Asked, command: Sequence[str]) -> int:
    """Runs the command as it was asked for; returns its exit code. Raises UsageError."""
    if elastic_options.is_asked(asked):
        return elastic_options.driver_of(asked, job_of(asked, command, 0)).run()
    places = seats(hosts_of(asked), asked["num_proc"], asked["nics"])
    return static.run(job_of(asked, command, len(places)), places)


def job_of(
    asked: Asked, command: Sequence[str], count: int,
    more: Mapping[str, str] = MappingProxyType({}),
) -> Job:  # fmt: skip
    """The job of these options; `count` processes at most, 0 if nobody knows."""
    output = Output(
        directory=asked["output_filename"], with_time=bool(asked["prefix_timestamp"]), count=count
    )
    door = Door(asked["ssh_port"], asked["ssh_identity_file"])
    return Job(
        command=command, output=output, told={**asked_for(asked), **more}, far=for_far_hosts(),
        door=door if door.words else None, binds_gpus=bool(asked["bind_gpus"]),
        says=bool(asked["verbose"]), heartbeat_timeout_secs=_heartbeat_timeout_secs(asked),
    )  # fmt: skip


def _heartbeat_timeout_secs(asked: Asked) -> float:
    found = asked["heartbeat_timeout_secs"]
    return TIMEOUT_SECS if found is None else float(found)


def _about(asked: Asked) -> str:
    """What is printed instead of running anything; "" if nothing is."""
    if asked["help"]:
        return options.helped()
    if asked["version"]:
        return __version__
    return builds.table() if asked["check_build"] else ""


def _check(asked: Asked, command: Sequence[str]) -> None:
    for key, name in (("use_mpi", "--mpi"), ("use_jsrun", "--jsrun")):
        if asked[key]:
            raise UsageError(f"{name} came; {config_file.NO_MPI}")
    _check_command(command)
    unused = options.meaningless(asked)
    if unused:
        verb = "means" if len(unused) == 1 else "mean"
        say(f"{', '.join(unused)} {verb} nothing here; the job runs without")
    if os.environ.get("TF_CONFIG"):
        say("TF_CONFIG was set already; each rank gets its own instead")


def _check_command(command: Sequence[str]) -> None:
    if not command:
        raise UsageError(f"no command came; expected e.g. {options.EXAMPLE}")
    program = command[0]
    if shutil.which(program) is None:
        cure = "expected a program on PATH or the path of an executable file"
        if program.startswith("-"):
            cure = f"a command starts with a program: `-- python {program} ...`"
        elif program.endswith(".py"):
            cure = f"a script runs with `python {program}`"
        where = "cannot be run" if os.path.exists(program) else "was not found"
        raise UsageError(f"the command {quoted(program)} {where}; {cure}")
