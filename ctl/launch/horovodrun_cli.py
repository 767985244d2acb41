"""The `ctlrun` command: parses and checks the command line, and runs the job."""

import functools
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Mapping, Sequence

from ctl.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from ctl.io.console import ignore_closed_stdout, quoted
from ctl.launch.config_file import add_config_file
from ctl.launch.discovery import FixedHosts, HostPoller, HostSource, find_script
from ctl.launch.elastic import ElasticJob
from ctl.launch.horovodrun_options import (
    CTLRUN_EXAMPLE,
    Options,
    ctlrun_help,
    ignored_option_names,
    parse_ctlrun,
    report,
)
from ctl.launch.host_allocation import allocate_ranks
from ctl.launch.host_health import HostHealth
from ctl.launch.hosts import LOOPBACK, Host, parse_hosts, read_hostfile, resolve_addresses
from ctl.launch.membership import Limits
from ctl.launch.mpirun import run_mpirun
from ctl.launch.output import RankOutput
from ctl.launch.process import NO_VARIABLES, check_program
from ctl.launch.rank_environment import horovod_environ, option_environ, remote_job_environ
from ctl.launch.rank_job import RankJob, run_ranks
from ctl.launch.ssh import SshOptions
from ctl.version import __version__

_HEARTBEAT_TIMEOUT_SECS = 60.0
_ELASTIC_TIMEOUT_SECS = 600
_FRAMEWORKS = (
    ("TensorFlow", ("tensorflow", "tensorflow-cpu", "tf-nightly")),
    ("Keras", ("keras",)),
    ("tf_keras", ("tf-keras", "tf_keras")),
    ("PyTorch", ()),
    ("MXNet", ()),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `ctlrun` with these arguments, by default those of the process. Returns its exit code.

    A usage error prints one sentence to stderr and returns exit code 2.
    """
    try:
        options, command = parse_ctlrun(list(sys.argv[1:] if argv is None else argv))
        information = _information_text(options)
        if information:
            with ignore_closed_stdout():
                print(information)
            return EXIT_DONE
        if options["config_file"]:
            add_config_file(options, options["config_file"])
        check_options(options, command)
        if options["use_mpi"]:
            as_horovod = horovod_environ() if options["as_horovod"] else {}
            environ = {**option_environ(options), **as_horovod}
            run_mpirun(options, parse_host_options(options), command, environ)
        if requests_elastic_job(options):
            return build_elastic_job(options, build_rank_job(options, command, 0)).run()
        placement = allocate_ranks(parse_host_options(options), options["num_proc"], options["nics"])
        return run_ranks(build_rank_job(options, command, len(placement.tasks)), placement)
    except UsageError as e:
        report(str(e))
        return e.exit_code
    except KeyboardInterrupt:
        report("stopped by Ctrl-C before a process was started")
        return EXIT_INTERRUPTED


def main_perseusrun() -> int:
    """Runs `perseusrun`, which is `ctlrun --as-horovod`."""
    return main(["--as-horovod", *sys.argv[1:]])


def build_rank_job(
    options: Options, command: Sequence[str], count: int, environ: Mapping[str, str] = NO_VARIABLES
) -> RankJob:
    """Returns the job of these options. `count` is the maximum number of processes, 0 if unknown."""
    timeout_secs = options["heartbeat_timeout_secs"]
    as_horovod = horovod_environ() if options["as_horovod"] else {}
    return RankJob(
        command=command,
        output=RankOutput(
            directory=options["output_filename"], with_time=bool(options["prefix_timestamp"]), count=count
        ),
        environ={**option_environ(options), **environ, **as_horovod},
        remote_environ=remote_job_environ(),
        ssh_options=SshOptions(options["ssh_port"], options["ssh_identity_file"]),
        binds_gpus=bool(options["bind_gpus"]),
        is_verbose=bool(options["verbose"]),
        heartbeat_timeout_secs=_HEARTBEAT_TIMEOUT_SECS if timeout_secs is None else timeout_secs,
    )


def parse_host_options(options: Options) -> list[Host] | None:
    """Returns the hosts of -H or --hostfile, None without either."""
    if options["hosts"] and options["hostfile"]:
        raise UsageError("-H cannot be combined with --hostfile: both list the hosts. Omit one of them")
    if options["hosts"]:
        return parse_hosts(options["hosts"])
    return read_hostfile(options["hostfile"]) if options["hostfile"] else None


def check_options(options: Options, command: Sequence[str]) -> None:
    """Raises UsageError for unsupported options. Reports options that are ignored."""
    if options["use_jsrun"]:
        raise UsageError("--jsrun was given, but jsrun is not supported; use --mpi, or omit the option")
    if options["mpi_args"] and not options["use_mpi"]:
        report("ignoring --mpi-args, which has an effect with --mpi only")
    if not command:
        raise UsageError(f"no command was given; expected e.g. {CTLRUN_EXAMPLE}")
    program = command[0]
    fix = "expected a program on PATH or the path of an executable file"
    if program.startswith("-"):
        fix = f"expected a program first, such as `-- python {program} ...`"
    elif program.endswith(".py"):
        fix = f"run a script with `python {program}`"
    check_program(program, fix)
    unused = ignored_option_names(options)
    if unused:
        report(f"ignoring options that have no effect in ctlrun: {', '.join(unused)}")
    if os.environ.get("TF_CONFIG"):
        report("ignoring the TF_CONFIG of this process: each rank receives its own")


def check_hosts_are_local(hosts: Iterable[str]) -> None:
    """Raises UsageError if there are other machines, which cannot access the files of a function's job."""
    for name in hosts:
        raise UsageError(
            f"{name} is another machine, but a function runs on this machine only. Write a script and "
            "start it with `ctlrun -np 2 -H ... python script.py`"
        )


def requests_elastic_job(options: Options) -> bool:
    """Returns True for an elastic job. Raises UsageError for options that require one."""
    if options["host_discovery_script"] or options["min_num_proc"]:
        return True
    names = {
        "max_num_proc": "--max-np",
        "reset_limit": "--reset-limit",
        "slots": "--slots-per-host",
        "cooldown": "--blacklist-cooldown-range",
    }
    for key, name in names.items():
        if options[key] is not None:
            raise UsageError(
                f"{name} requires an elastic job; add --host-discovery-script FILE or --min-np N, or omit "
                f"{name}"
            )
    return False


def build_elastic_job(options: Options, job: RankJob, *, local_only: bool = False) -> ElasticJob:
    """Returns an elastic job. Raises UsageError for numbers that exclude each other.

    Args:
      options: Options of `ctlrun`.
      job: Command and environment of the processes.
      local_only: If True, other machines are not allowed.
    """
    limits, cooldown = parse_elastic_limits(options), options["cooldown"]
    if cooldown and cooldown[0] > cooldown[1]:
        raise UsageError(
            f"--blacklist-cooldown-range {cooldown[0]} {cooldown[1]} has a minimum above its maximum; "
            "expected the smaller value first"
        )
    source = _host_source(options, limits)
    remote_targets = [h.target for h in source.hosts if not h.is_local] if source.hosts else []
    if local_only:
        check_hosts_are_local(remote_targets)
    is_alone = bool(source.hosts) and not remote_targets and not options["nics"]
    return ElasticJob(
        job,
        limits,
        HostHealth(cooldown),
        source,
        resolve=functools.partial(resolve_addresses, nics=options["nics"]),
        listens_at=LOOPBACK if is_alone else "0.0.0.0",
    )


def parse_elastic_limits(options: Options) -> Limits:
    """Returns the limits of the number of processes.

    Raises UsageError unless --min-np <= -np <= --max-np.
    """
    initial, maximum = options["num_proc"], options["max_num_proc"]
    minimum = options["min_num_proc"] or initial
    if minimum is None:
        raise UsageError("-np is missing; expected the initial number of processes, such as -np 2")
    initial = minimum if initial is None else initial
    for lower, upper, message in (
        (minimum, initial, "--min-np {} is greater than -np {}"),
        (initial, maximum, "-np {} is greater than --max-np {}"),
    ):
        if upper is not None and lower > upper:
            raise UsageError(message.format(lower, upper) + "; expected --min-np <= -np <= --max-np")
    timeout = options["elastic_timeout"] or os.environ.get("HOROVOD_ELASTIC_TIMEOUT")
    timeout = str(timeout or _ELASTIC_TIMEOUT_SECS)
    if not timeout.isdigit():
        raise UsageError(f"HOROVOD_ELASTIC_TIMEOUT is {quoted(timeout)}; expected whole seconds")
    return Limits(
        initial=initial,
        minimum=minimum,
        maximum=maximum,
        timeout_secs=float(timeout),
        max_resets=options["reset_limit"],
    )


def _host_source(options: Options, limits: Limits) -> HostSource:
    hosts, script = parse_host_options(options), options["host_discovery_script"]
    if script is None:
        hosts = hosts or [Host("localhost", limits.maximum or limits.initial)]
        slots = sum(host.slots for host in hosts)
        if slots < limits.initial:
            raise UsageError(
                f"-np {limits.initial} is greater than the {slots} slots of the hosts; expected at most "
                f"{slots}"
            )
        return FixedHosts(hosts)
    if hosts is not None:
        raise UsageError(
            "-H and --hostfile cannot be combined with --host-discovery-script: the script lists the "
            "hosts. "
            "Omit them"
        )
    return HostPoller(find_script(script, "--host-discovery-script "), options["slots"] or 1)


def _information_text(options: Options) -> str:
    """Returns the text to print for --help, --version or --check-build, else ""."""
    if options["help"]:
        return ctlrun_help()
    if options["version"]:
        return __version__
    return _build_table() if options["check_build"] else ""


def _build_table() -> str:
    """Returns the table of --check-build in horovodrun's layout. Does not import TensorFlow."""
    lines = [f"ctl v{__version__}:", "", "Available Frameworks:"]
    for name, packages in _FRAMEWORKS:
        version = package_version(packages)
        lines.append(f"    [{'X' if version else ' '}] {f'{name} {version}'.rstrip()}")
    mpi = f"    [{'X' if package_version(['mpi4py']) else ' '}] MPI"
    lines += ["", "Available Controllers:", mpi, "    [X] TCP (selected by --gloo)"]
    lines += ["", "Available Tensor Operations:", "    [X] TCP (ring, between processes)", mpi]
    lines += [f"    [ ] {name}" for name in ("NCCL", "DDL", "CCL", "Gloo")]
    return "\n".join(lines)


def package_version(names: Iterable[str]) -> str:
    """Returns the version of the first installed package, or "" if none is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


if __name__ == "__main__":
    sys.exit(main())
