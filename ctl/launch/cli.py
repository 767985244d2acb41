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
from ctl.launch.option_values import number_in, whole_number
from ctl.launch.process import check_program
from ctl.launch.progress import flag_value, local_model_dir
from ctl.launch.restart_policy import RestartPolicy
from ctl.launch.supervisor import JobSettings, run_job
from ctl.supervision import lease

LAUNCH_EXAMPLE = "ctl launch --workers=2 -- python -m models.mnist --model_dir=/tmp/mnist"
_PROGRAM_CURE = (
    "expected a program on PATH or the path of an executable file. A script runs with `-- python script.py`"
)
_MAX_MESSAGE = 300  # length limit of an error message that repeats arguments (characters)


def _converter(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns the converter with argparse's error type."""

    def wrapped(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(f"{quoted(text)} came, {e}") from None

    return wrapped


_workers = _converter(whole_number(1, MAX_WORKERS))
_secs = _converter(number_in(lambda secs: 0 <= secs <= 1e9, "seconds from 0, such as 30"))
_port = _converter(whole_number(1, 65535))
_mib = _converter(
    number_in(lambda mib: mib == 0 or 0.01 <= mib <= 1e6, "MiB, such as 256, or 0 for no bound")
)


class _Option(NamedTuple):
    names: str
    type: Callable[[str], Any] | None  # None for a switch
    default: Any
    metavar: str
    help: str


_OPTIONS: dict[str, list[_Option]] = {
    "the job": [
        _Option("--workers", _workers, None, "N", "how many workers to start (default: 1)"),
        _Option("--chief", None, False, "",
                "start a chief beside them, one process more (default: worker 0 is the chief)"),
        _Option("--ps", _workers, 0, "N",
                "how many parameter servers to start, and a chief, who coordinates (default: none)"),
        _Option("--evaluator", None, False, "",
                "start an evaluator, which evaluates the checkpoints (default: none)"),
        _Option("--host", str, None, "ADDRESS",
                "this machine's address in TF_CONFIG, IPv4 (default: 127.0.0.1)"),
    ],
    "several machines": [
        _Option("-H --hosts", str, None, "HOST:N,...", "machines and how many workers each takes, "
                "reached with ssh (default: this one alone)"),
        _Option("--port", _port, 2222, "PORT", "of the first worker on another machine, "
                "the next ones follow (default: 2222)"),
        _Option("--host_discovery", str, None, "SCRIPT", "a program that prints a line `host:N` for "
                "each machine there is; it is asked before every attempt (default: none)"),
        _Option("--min_workers", _workers, None, "N",
                "with --host_discovery, wait until there is room for so many (default: 1)"),
        _Option("--max_workers", _workers, None, "N",
                "with --host_discovery, start so many at most (default: all there is room for)"),
    ],
    "restarts": [
        _Option("--max_restarts", _converter(whole_number(0, 1_000_000)), 3, "N",
                "how often to start all again after a lost worker or a hang (default: 3)"),
        _Option("--backoff_secs", _secs, 1.0, "SECS", "seconds before the first restart, doubled "
                "before each further one up to 60 (default: 1)"),
        _Option("--restart_on_error", None, False, "",
                "restart also after exit codes 1 to 127 except 2 (default: those are permanent)"),
        _Option("--grace_secs", _secs, 30.0, "SECS", "seconds from SIGTERM (or a Ctrl-C passed on) to "
                "SIGKILL, and for workers to end once the chief is done (default: 30)"),
    ],
    "hangs": [
        _Option("--heartbeat_timeout_secs", _secs, 60.0, "SECS", "a worker is hung after so many "
                "seconds without a sign of life; 0 is off (default: 60)"),
        _Option("--hang_timeout_secs", _secs, 0.0, "SECS",
                "and after so many seconds of training without a step; 0 is off (default: 0)"),
        _Option("--startup_timeout_secs", _secs, 600.0, "SECS", "seconds for all workers to find each "
                "other, and for enough hosts to be there; 0 is without end (default: 600)"),
    ],
    "logs": [
        _Option("--log_dir", str, None, "DIR", "where job_0.log, job_1.log, ... go, the chief's first, "
                "and ps_0.log, evaluator_0.log (default: workers/ in the command's --model_dir, or a "
                "new temporary directory)"),
        _Option("--max_log_mib", _mib, 256.0, "MIB",
                "a longer log keeps its beginning and its end; 0 is without bound (default: 256)"),
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
        allocation = allocation_of(options)
        check_program(command[0], _PROGRAM_CURE)
        _claim_model_dir(command)
        log_dir = log_dir_of(options.log_dir, command)
        if os.environ.get("TF_CONFIG"):
            print_message("TF_CONFIG was set already; each worker gets a new one instead")
        if options.ps and not options.chief:
            print_message("parameter servers need a coordinator: a chief is started as well (--chief)")
        settings = _settings(options, command)
        with log_dir_lock(log_dir):
            return run_job(command, allocation=allocation, log_dir=log_dir, settings=settings)
    except UsageError as e:
        print_message(str(e))
        return e.exit_code
    except KeyboardInterrupt:
        print_message("stopped by Ctrl-C before any process was started")
        return EXIT_INTERRUPTED


def parse_launch(argv: list[str]) -> tuple[argparse.Namespace | None, list[str]]:
    """Returns the options and the command. For --help prints the help and returns (None, [])."""
    split = argv.index("--") if "--" in argv else len(argv)
    options, command = argv[:split], argv[split + 1 :]
    parser = _launch_parser()
    if "-h" in options or "--help" in options:
        print(parser.format_help())
        return None, []
    parsed, unknown = parser.parse_known_args(options)
    if unknown:
        cure = "see `ctl launch --help`; options of the command go after `--`"
        if split == len(argv):
            cure = f"write the command after `--`: {LAUNCH_EXAMPLE}"
        raise UsageError(f"{quoted(unknown[0])} is not an option of the launcher; {cure}")
    if not command:
        raise UsageError(f"no command came after `--`; expected e.g. {LAUNCH_EXAMPLE}")
    return parsed, command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        short = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."
        raise UsageError(f"{short}; see `ctl launch --help`")


def _launch_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ctl launch",
        usage="ctl launch [options] -- command [its options]",
        description="Runs a command once per worker, with a TF_CONFIG for each, and starts all of them "
        "again when one is lost.\nThe first to fail decides.",
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


def _settings(options: argparse.Namespace, command: list[str]) -> JobSettings:
    model_dir = local_model_dir(command)
    return JobSettings(
        grace_secs=options.grace_secs,
        policy=RestartPolicy(
            max_restarts=options.max_restarts,
            backoff_secs=options.backoff_secs,
            restart_on_error=options.restart_on_error,
            saves=model_dir is not None,
            hosts_change=options.host_discovery is not None,
        ),
        timeouts=Timeouts(
            heartbeat=options.heartbeat_timeout_secs,
            hang=options.hang_timeout_secs,
            startup=options.startup_timeout_secs,
        ),
        model_dir=model_dir,
        max_log_bytes=int(options.max_log_mib * 2**20),
    )


def allocation_of(options: argparse.Namespace) -> Allocation:
    """Returns the allocation of the workers. Raises UsageError for options that exclude each other."""
    if options.host is not None:
        _check_host(options.host)
    if options.host_discovery is None:
        for name in ("min_workers", "max_workers"):
            if (value := getattr(options, name)) is not None:
                raise UsageError(
                    f"--{name}={value} needs --host_discovery=SCRIPT, which says how many workers there "
                    "is room for; without one the number is that of --workers or -H"
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
            cure = "on several machines there are workers only"
            if name == "workers":
                cure = "the slots of the hosts say how many workers there are"
            raise UsageError(f"--{name} came with {source}; {cure}, so leave --{name} out")
    if options.host_discovery is None:
        hosts = parse_hosts(options.hosts)
        return HostAllocation(hosts, port=options.port, own_address=options.host)
    if options.hosts is not None:
        raise UsageError("-H came with --host_discovery; the script names the hosts, so leave -H out")
    return _discovered(options)


def _discovered(options: argparse.Namespace) -> Allocation:
    least = 1 if options.min_workers is None else options.min_workers
    if options.max_workers is not None and options.max_workers < least:
        raise UsageError(
            f"--min_workers={least} is more than --max_workers={options.max_workers}; expected at most "
            "as many"
        )
    return DiscoveredAllocation(
        find_script(options.host_discovery, "--host_discovery="),
        least=least,
        most=options.max_workers,
        port=options.port,
        own_address=options.host,
    )


def _check_host(host: str) -> None:
    try:
        found = parse_host(host)
    except UsageError:
        found = None
    if found is None or ":" in host or "@" in host:
        raise UsageError(
            f"--host={quoted(host)} is no address; expected an IPv4 address of this machine, or its name. "
            f"Write --host={LOOPBACK}."
        )


def _claim_model_dir(command: list[str]) -> None:
    """Raises UsageError while another job trains in the command's model_dir, which also has its logs."""
    model_dir = local_model_dir(command)
    trains = flag_value("mode", command) not in ("eval", "export", "predict")
    if model_dir is not None and trains:
        lease.check_model_dir_is_free(str(model_dir))


def log_dir_of(option: str | None, command: list[str]) -> Path:
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
                f"logs cannot be written to {str(log_dir)!r} ({e.strerror}); the job starts all the same"
            )
            return log_dir
        raise UsageError(
            f"logs cannot be written to {str(log_dir)!r} ({e.strerror}); give a directory that "
            "can be written with --log_dir=DIR"
        ) from None
    return log_dir


def _temporary_log_dir() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="ctl-launch-"))
    except OSError as e:
        log_dir = Path("ctl-launch-logs").absolute()
        print_message(
            f"no temporary directory can be written ({e.strerror}); the job starts all the same, with logs "
            f"in {log_dir} if that can be written. Give a directory with --log_dir=DIR"
        )
        return log_dir
