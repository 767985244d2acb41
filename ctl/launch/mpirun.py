"""Jobs of `ctlrun --mpi`: mpirun starts and supervises the ranks, and collectives use MPI.

command = build_mpirun_command(find_mpirun(), options, hosts, ["python", "train.py"], environ)
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ctl.collectives.settings import PLANE_VARIABLE
from ctl.errors import UsageError
from ctl.io.console import quoted
from ctl.launch.horovodrun_options import Options
from ctl.launch.hosts import Host
from ctl.launch.process import JOB_VARIABLES

_VERSION_SECS = 30.0
_OPEN_MPI_NAMES = ("Open MPI", "OpenRTE", "PRRTE")
_UNSUPPORTED = {  # key of an option -> its name
    "host_discovery_script": "--host-discovery-script", "min_num_proc": "--min-np",
    "max_num_proc": "--max-np", "output_filename": "--output-filename",
    "prefix_timestamp": "--prefix-timestamp", "bind_gpus": "--bind_gpus", "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file", "nics": "--network-interfaces",
    "heartbeat_timeout_secs": "--heartbeat-timeout",
}  # fmt: skip


@dataclass(frozen=True)
class Mpirun:
    """An `mpirun` program.

    Attributes:
      path: Path of the program.
      is_open_mpi: True for Open MPI, False for MPICH and programs with its options.
    """

    path: str
    is_open_mpi: bool


def find_mpirun() -> Mpirun:
    """Returns the `mpirun` or `mpiexec` on PATH. Raises UsageError if there is none or if it fails."""
    path = shutil.which("mpirun") or shutil.which("mpiexec")
    if path is None:
        raise UsageError(
            "--mpi was given, but mpirun was not found on PATH; install MPI, for example with `pip install "
            "mpich mpi4py`, or load the module of the cluster, or omit --mpi"
        )
    try:
        version = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_SECS, check=True
        )
    except (OSError, subprocess.SubprocessError) as e:
        raise UsageError(f"--mpi was given, but `{path} --version` fails ({e}); repair MPI") from None
    return Mpirun(path, any(name in version.stdout for name in _OPEN_MPI_NAMES))


def check_mpi_options(options: Options) -> None:
    """Raises UsageError for options that only ctlrun's own launcher supports."""
    for key, name in _UNSUPPORTED.items():
        if options[key]:
            raise UsageError(
                f"{name} was given with --mpi, but mpirun starts the ranks; omit one of them, or pass an "
                "option of mpirun with --mpi-args='...'"
            )


def build_mpirun_command(
    mpirun: Mpirun,
    options: Options,
    hosts: Sequence[Host] | None,
    command: Sequence[str],
    environ: Mapping[str, str],
) -> list[str]:
    """Returns the command line that starts the ranks.

    Args:
      mpirun: The program.
      options: Options of ctlrun.
      hosts: Hosts and their slots, or None for this machine.
      command: Command of each rank.
      environ: Variables of the ranks that Open MPI does not copy to other machines by default.

    Raises:
      UsageError: If the number of processes or --mpi-args is invalid.
    """
    count = options["num_proc"] or sum(host.slots for host in hosts or ())
    if not count:
        raise UsageError("-np is missing; expected the number of processes, such as -np 2")
    arguments = [mpirun.path, "-np", str(count)]
    if hosts:
        listed = ",".join(f"{host.target}:{host.slots}" for host in hosts)
        arguments += ["-H" if mpirun.is_open_mpi else "-hosts", listed]
    if mpirun.is_open_mpi:
        arguments += [part for name in environ for part in ("-x", name)]
    try:
        arguments += shlex.split(options["mpi_args"] or "")
    except ValueError as e:
        received = quoted(options["mpi_args"])
        raise UsageError(f"--mpi-args received {received}; expected arguments of mpirun ({e})") from None
    return [*arguments, *command]


def run_mpirun(
    options: Options, hosts: Sequence[Host] | None, command: Sequence[str], environ: Mapping[str, str]
) -> NoReturn:
    """Replaces this process by mpirun, which receives its signals and returns the exit code.

    Args:
      options: Options of ctlrun.
      hosts: Hosts and their slots, or None for this machine.
      command: Command of each rank.
      environ: Variables of the collectives.
    """
    check_mpi_options(options)
    job_environ = {**environ, PLANE_VARIABLE: "mpi"}
    arguments = build_mpirun_command(find_mpirun(), options, hosts, command, job_environ)
    inherited = {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES}
    os.execve(arguments[0], arguments, {**inherited, **job_environ, "PYTHONUNBUFFERED": "1"})
