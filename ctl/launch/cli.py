"""The `ctl launch` command: parses and checks the command line, and passes the job to the supervisor."""

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ctl.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from ctl.io import disk_errors
from ctl.io.console import print_message, quoted
from ctl.launch.discovery import find_script
from ctl.launch.elastic_workers import check_elastic_options, run_elastic_workers
from ctl.launch.heartbeat_monitor import Timeouts
from ctl.launch.host_allocation import (
    Allocation,
    DiscoveredAllocation,
    HostAllocation,
    LocalAllocation,
    RoleCounts,
)
from ctl.launch.hosts import LOOPBACK, MAX_WORKERS, parse_host, parse_hosts
from ctl.launch.log_files import log_dir_lock
from ctl.launch.option_values import number_in, whole_number, worker_range
from ctl.launch.process import check_program
from ctl.launch.progress import flag_value, local_model_dir
from ctl.launch.restart_policy import RestartPolicy
from ctl.launch.supervisor import JobSettings, run_job
from ctl.setting_values import WorkerRange
from ctl.supervision import lease

LAUNCH_EXAMPLE = "ctl launch --workers=2 -- python -m models.mnist --model_dir=/tmp/mnist"
_PROGRAM_FIX = (
    "expected a program on PATH or the path of an executable file. A script runs with `-- python script.py`"
)
_PORT = 2222  # of the first worker on another machine
_MAX_MESSAGE = 300  # length limit of an error message that repeats arguments (characters)


def _converter(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a converter that raises argparse's error type."""

    def wrapped(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(f"received {quoted(text)}; {e}") from None

    return wrapped


_workers = _converter(whole_number(1, MAX_WORKERS))
_workers_or_range = _converter(worker_range(MAX_WORKERS))
_secs = _converter(number_in(lambda secs: 0 <= secs <= 1e9, "seconds from 0, such as 30"))
_port = _converter(whole_number(1, 65535))
_mib = _converter(
    number_in(lambda mib: mib == 0 or 0.01 <= mib <= 1e6, "MiB, such as 256, or 0 for no limit")
)


class _Option(NamedTuple):
    names: str
    type: Callable[[str], Any] | None  # None for a switch
    default: Any
    metavar: str
    help: str


_OPTIONS: dict[str, list[_Option]] = {
    "the job": [
        _Option("--workers", _workers_or_range, None, "N", "number of workers, or MIN:MAX for an elastic "
                "job, which starts MAX and continues while MIN remain, also with -H or --host_discovery "
                "(default: 1)"),
        _Option("--elastic_timeout_secs", _secs, 600.0, "SECS", "with --workers=MIN:MAX: seconds to wait "
                "for MIN workers, then the job ends with exit code 134 (default: 600)"),
        _Option("--chief", None, False, "",
                "start a separate chief in addition to the workers (default: worker 0 is the chief)"),
        _Option("--ps", _workers, 0, "N",
                "number of parameter servers; implies --chief, which coordinates them (default: 0)"),
        _Option("--evaluator", None, False, "",
                "start a process that evaluates the checkpoints (default: none)"),
        _Option("--host", str, None, "ADDRESS",
                "IPv4 address of this machine in TF_CONFIG (default: 127.0.0.1)"),
    ],
    "several machines": [
        _Option("-H --hosts", str, None, "HOST:N,...", "machines with their numbers of workers, "
                "connected by ssh (default: this machine only)"),
        _Option("--port", _port, None, "PORT", "port of the first worker on another "
                "machine; further workers use the following ports (default: 2222)"),
        _Option("--host_discovery", str, None, "SCRIPT", "a program that prints a line `host:N` for "
                "each available machine; it runs before every attempt, and every second during an elastic "
                "job (default: none)"),
        _Option("--min_workers", _workers, None, "N",
                "with --host_discovery: minimum number of workers to wait for (default: 1)"),
        _Option("--max_workers", _workers, None, "N",
                "with --host_discovery: maximum number of workers (default: all slots)"),
    ],
    "restarts": [
        _Option("--max_restarts", _converter(whole_number(0, 1_000_000)), 3, "N",
                "maximum number of restarts after a lost worker or a hang (default: 3)"),
        _Option("--backoff_secs", _secs, 1.0, "SECS", "delay before the first restart, doubled "
                "for each further one, at most 60 (default: 1)"),
        _Option("--restart_on_error", None, False, "",
                "restart also after exit codes 1 to 127 except 2 (default: these are permanent)"),
        _Option("--grace_secs", _secs, 30.0, "SECS", "seconds from SIGTERM (or a forwarded Ctrl-C) to "
                "SIGKILL, and for workers to exit after the chief has finished (default: 30)"),
    ],
    "hangs": [
        _Option("--heartbeat_timeout_secs", _secs, 60.0, "SECS", "seconds without a heartbeat after "
                "which a worker counts as hung; 0 disables the check (default: 60)"),
        _Option("--hang_timeout_secs", _secs, 0.0, "SECS",
                "seconds of training without a step after which a worker counts as hung; 0 disables the "
                "check (default: 0)"),
        _Option("--startup_timeout_secs", _secs, 600.0, "SECS", "seconds for all workers to connect to "
                "each other, and for enough hosts to be available; 0 disables the limit (default: 600)"),
    ],
    "logs": [
        _Option("--log_dir", str, None, "DIR", "directory of the logs: job_0.log (the chief), job_1.log, "
                "..., ps_0.log, evaluator_0.log (default: workers/ in the command's --model_dir, or a "
                "new temporary directory)"),
        _Option("--max_log_mib", _mib, 256.0, "MIB",
                "size limit of a log; a longer log keeps its beginning and its end; 0 disables the limit "
                "(default: 256)"),
    ],
    "about": [_Option("-h --help", None, False, "", "show this text")],
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Runs `ctl launch` with the arguments after "launch" and returns its exit code.

    A usage error prints one sentence to stderr and returns exit code 2.
    """
    try:
        options, command = parse_launch(list(argv))
        if options is None:
            return EXIT_DONE
        allocation = build_allocation(options)
        check_program(command[0], _PROGRAM_FIX)
        _check_model_dir_is_free(command)
        log_dir = choose_log_dir(options.log_dir, command)
        if os.environ.get("TF_CONFIG"):
            print_message("ignoring the TF_CONFIG of this process: each worker receives its own")
        if options.ps and not options.chief:
            print_message("parameter servers require a coordinator; starting a chief (--chief)")
        settings = _job_settings(options, command)
        with log_dir_lock(log_dir):
            if allocation is None:
                return run_elastic_workers(command, options, settings, log_dir)
            return run_job(command, allocation=allocation, log_dir=log_dir, settings=settings)
    except UsageError as e:
        print_message(str(e))
        return e.exit_code
    except KeyboardInterrupt:
        print_message("stopped by Ctrl-C before a process was started")
        return EXIT_INTERRUPTED


def parse_launch(arguments: list[str]) -> tuple[argparse.Namespace | None, list[str]]:
    """Returns the options and the command. For --help prints the help and returns (None, [])."""
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = arguments[:separator], arguments[separator + 1 :]
    parser = _launch_parser()
    if "-h" in options or "--help" in options:
        print(parser.format_help())
        return None, []
    parsed, unknown = parser.parse_known_args(options)
    if unknown:
        fix = "see `ctl launch --help`; options of the command go after `--`"
        if separator == len(arguments):
            fix = f"write the command after `--`: {LAUNCH_EXAMPLE}"
        raise UsageError(f"{quoted(unknown[0])} is not an option of the launcher; {fix}")
    if not command:
        raise UsageError(f"no command was given after `--`; expected e.g. {LAUNCH_EXAMPLE}")
    return parsed, command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        short = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."
        raise UsageError(f"{short}; see `ctl launch --help`")


def _launch_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ctl launch",
        usage="ctl launch [options] -- command [its options]",
        description="Runs a command once per worker, each with its own TF_CONFIG, and restarts all workers "
        "if one is lost.\nThe exit code is that of the first process that failed.",
        epilog=f"example:\n  {LAUNCH_EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    for title, options in _OPTIONS.items():
        group = parser.add_argument_group(title)
        for option in options:
            names, text = option.names.split(), option.help
            if option.type is None:
                group.add_argument(*names, action="store_true", help=text)
            else:
                group.add_argument(
                    *names, type=option.type, default=option.default, metavar=option.metavar, help=text
                )
    return parser


def _job_settings(options: argparse.Namespace, command: list[str]) -> JobSettings:
    model_dir = local_model_dir(command)
    return JobSettings(
        grace_secs=options.grace_secs,
        policy=RestartPolicy(
            max_restarts=options.max_restarts,
            backoff_secs=options.backoff_secs,
            restart_on_error=options.restart_on_error,
            has_checkpoints=model_dir is not None,
            has_dynamic_hosts=options.host_discovery is not None,
        ),
        timeouts=Timeouts(
            heartbeat=options.heartbeat_timeout_secs,
            hang=options.hang_timeout_secs,
            startup=options.startup_timeout_secs,
        ),
        model_dir=model_dir,
        max_log_bytes=int(options.max_log_mib * 2**20),
    )


def build_allocation(options: argparse.Namespace) -> Allocation | None:
    """Returns the allocation of the workers. None: the job is elastic, and allocates them itself.

    Raises UsageError for options that exclude each other.
    """
    if options.host is not None:
        _check_host(options.host)
    if isinstance(options.workers, WorkerRange):
        check_elastic_options(options)
        return None
    if options.host_discovery is None:
        for name in ("min_workers", "max_workers"):
            if (value := getattr(options, name)) is not None:
                raise UsageError(
                    f"--{name}={value} requires --host_discovery=SCRIPT; without a script, set the number "
                    "of workers with --workers or -H"
                )
        if options.hosts is None:
            roles = RoleCounts(
                workers=1 if options.workers is None else options.workers,
                chief=options.chief or options.ps > 0,
                ps=options.ps,
                evaluator=options.evaluator,
            )
            return LocalAllocation(roles, LOOPBACK if options.host is None else options.host)
    source = "-H" if options.host_discovery is None else "--host_discovery"
    for name in ("workers", "chief", "ps", "evaluator"):
        if getattr(options, name):
            reason = "a job on several machines has workers only"
            if name == "workers":
                reason = "the slots of the hosts determine the number of workers"
            raise UsageError(f"--{name} cannot be combined with {source}: {reason}. Omit --{name}")
    if options.host_discovery is None:
        hosts = parse_hosts(options.hosts)
        return HostAllocation(hosts, port=options.port or _PORT, own_address=options.host)
    if options.hosts is not None:
        raise UsageError("-H cannot be combined with --host_discovery: the script lists the hosts. Omit -H")
    return _discovered_allocation(options)


def _discovered_allocation(options: argparse.Namespace) -> Allocation:
    min_workers = 1 if options.min_workers is None else options.min_workers
    if options.max_workers is not None and options.max_workers < min_workers:
        raise UsageError(
            f"--min_workers={min_workers} is greater than --max_workers={options.max_workers}; expected "
            "--min_workers <= --max_workers"
        )
    return DiscoveredAllocation(
        find_script(options.host_discovery, "--host_discovery="),
        min_workers=min_workers,
        max_workers=options.max_workers,
        port=options.port or _PORT,
        own_address=options.host,
    )


def _check_host(host: str) -> None:
    try:
        parsed_host = parse_host(host)
    except UsageError:
        parsed_host = None
    if parsed_host is None or ":" in host or "@" in host:
        raise UsageError(
            f"--host={quoted(host)} is not an address; expected an IPv4 address or the name of this "
            f"machine, such as --host={LOOPBACK}"
        )


def _check_model_dir_is_free(command: list[str]) -> None:
    """Raises UsageError if another job trains in the command's model_dir, which also contains its logs."""
    model_dir = local_model_dir(command)
    trains = flag_value("mode", command) not in ("eval", "export", "predict")
    if model_dir is not None and trains:
        lease.check_model_dir_is_free(str(model_dir))


def choose_log_dir(option: str | None, command: list[str]) -> Path:
    """Returns the directory of the logs, created if necessary. Raises UsageError if it is not writable."""
    model_dir = local_model_dir(command)
    if option:
        log_dir = Path(option)
    elif model_dir is not None:
        log_dir = model_dir / "workers"
    else:
        return _temporary_log_dir()
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        (log_dir / "job_0.log").open("ab").close()
    except OSError as e:
        if disk_errors.is_transient(e):
            print_message(
                f"cannot write logs to {str(log_dir)!r} ({e.strerror}); starting the job without them"
            )
            return log_dir
        raise UsageError(
            f"cannot write logs to {str(log_dir)!r} ({e.strerror}); specify a writable directory with "
            "--log_dir=DIR"
        ) from None
    return log_dir


def _temporary_log_dir() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="ctl-launch-"))
    except OSError as e:
        log_dir = Path("ctl-launch-logs").absolute()
        print_message(
            f"cannot create a temporary directory ({e.strerror}); starting the job with logs in {log_dir} "
            "if that is writable. Specify a directory with --log_dir=DIR"
        )
        return log_dir
