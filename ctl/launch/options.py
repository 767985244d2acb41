"""The options of `ctl launch`: what they are called, what they mean, and which values they take."""

import argparse
import math
import re
from typing import NoReturn

from ctl.errors import UsageError
from ctl.io.console import quoted
from ctl.launch.hosts import MOST_WORKERS

EXAMPLE = "ctl launch --workers=2 -- python -m models.mnist --model_dir=/tmp/mnist"
_LONGEST_SECS = 1e9
_MOST_RESTARTS = 1_000_000
_MOST_MIB = 1_000_000
_MOST_WORDS = 300  # characters of a message that repeats what came


def read(argv: list[str]) -> tuple[argparse.Namespace | None, list[str]]:
    """The options and the command; no options when only help was wanted, which is then printed."""
    split = argv.index("--") if "--" in argv else len(argv)
    options, command = argv[:split], argv[split + 1 :]
    parser = _parser()
    if "-h" in options or "--help" in options:
        print(parser.format_help())
        return None, []
    parsed, unknown = parser.parse_known_args(options)
    if unknown:
        cure = (
            f"write the command after `--`: {EXAMPLE}"
            if split == len(argv)
            else ("see `ctl launch --help`; options of the command go after `--`")
        )
        raise UsageError(f"{quoted(unknown[0])} is not an option of the launcher; {cure}")
    if not command:
        raise UsageError(f"no command came after `--`; expected e.g. {EXAMPLE}")
    return parsed, command


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ctl launch",
        usage="ctl launch [options] -- command [its options]",
        description="Runs a command once per worker, with a TF_CONFIG for each, and starts all of them "
        "again when one is lost.\nThe first to fail decides.",
        epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    _add_job(parser)
    _add_machines(parser)
    _add_restarts(parser)
    _add_hangs(parser)
    _add_logs(parser)
    about = parser.add_argument_group("about")
    about.add_argument("-h", "--help", action="store_true", help="show this text")
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("the job")
    job.add_argument(
        "--workers",
        type=_workers,
        metavar="N",
        help="how many workers to start (default: 1)",
    )
    job.add_argument(
        "--chief",
        action="store_true",
        help="start a chief beside them, one process more (default: worker 0 is the chief)",
    )
    job.add_argument(
        "--ps",
        type=_workers,
        default=0,
        metavar="N",
        help="how many parameter servers to start, and a chief, who coordinates (default: none)",
    )
    job.add_argument(
        "--evaluator",
        action="store_true",
        help="start an evaluator, which evaluates the checkpoints (default: none)",
    )
    job.add_argument(
        "--host",
        metavar="ADDRESS",
        help="this machine's address in TF_CONFIG, IPv4 (default: 127.0.0.1)",
    )


def _add_machines(parser: argparse.ArgumentParser) -> None:
    machines = parser.add_argument_group("several machines")
    machines.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:N,...",
        help="machines and how many workers each takes, reached with ssh (default: this one alone)",
    )
    machines.add_argument(
        "--port",
        type=_port,
        default=2222,
        metavar="PORT",
        help="of the first worker on another machine, the next ones follow (default: 2222)",
    )
    machines.add_argument(
        "--host_discovery",
        metavar="SCRIPT",
        help="a program that prints a line `host:N` for each machine there is; it is asked before "
        "every attempt (default: none)",
    )
    machines.add_argument(
        "--min_workers",
        type=_workers,
        metavar="N",
        help="with --host_discovery, wait until there is room for so many (default: 1)",
    )
    machines.add_argument(
        "--max_workers",
        type=_workers,
        metavar="N",
        help="with --host_discovery, start so many at most (default: all there is room for)",
    )


def _add_restarts(parser: argparse.ArgumentParser) -> None:
    restarts = parser.add_argument_group("restarts")
    restarts.add_argument(
        "--max_restarts",
        type=_count,
        default=3,
        metavar="N",
        help="how often to start all again after a lost worker or a hang (default: 3)",
    )
    restarts.add_argument(
        "--backoff_secs",
        type=_secs,
        default=1.0,
        metavar="SECS",
        help="seconds before the first restart, doubled before each further one up to 60 (default: 1)",
    )
    restarts.add_argument(
        "--restart_on_error",
        action="store_true",
        help="restart also after exit codes 1 to 127 except 2 (default: those are permanent)",
    )
    restarts.add_argument(
        "--grace_secs",
        type=_secs,
        default=30.0,
        metavar="SECS",
        help="seconds from SIGTERM (or a Ctrl-C passed on) to SIGKILL, and for workers to end "
        "once the chief is done (default: 30)",
    )


def _add_hangs(parser: argparse.ArgumentParser) -> None:
    hangs = parser.add_argument_group("hangs")
    hangs.add_argument(
        "--heartbeat_timeout_secs",
        type=_secs,
        default=60.0,
        metavar="SECS",
        help="a worker is hung after so many seconds without a sign of life; 0 is off (default: 60)",
    )
    hangs.add_argument(
        "--hang_timeout_secs",
        type=_secs,
        default=0.0,
        metavar="SECS",
        help="and after so many seconds of training without a step; 0 is off (default: 0)",
    )
    hangs.add_argument(
        "--startup_timeout_secs",
        type=_secs,
        default=600.0,
        metavar="SECS",
        help="seconds for all workers to find each other, and for enough hosts to be there; 0 is "
        "without end (default: 600)",
    )


def _add_logs(parser: argparse.ArgumentParser) -> None:
    logs = parser.add_argument_group("logs")
    logs.add_argument(
        "--log_dir",
        metavar="DIR",
        help="where job_0.log, job_1.log, ... go, the chief's first, and ps_0.log, evaluator_0.log "
        "(default: workers/ in the command's --model_dir, or a new temporary directory)",
    )
    logs.add_argument(
        "--max_log_mib",
        type=_mib,
        default=256.0,
        metavar="MIB",
        help="a longer log keeps its beginning and its end; 0 is without bound (default: 256)",
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        short = message if len(message) <= _MOST_WORDS else message[:_MOST_WORDS] + "..."
        raise UsageError(f"{short}; see `ctl launch --help`")


def _workers(text: str) -> int:
    return _whole(text, 1, MOST_WORKERS)


def _count(text: str) -> int:
    return _whole(text, 0, _MOST_RESTARTS)


def _port(text: str) -> int:
    return _whole(text, 1, 65535)


def _whole(text: str, least: int, most: int) -> int:
    if not (re.fullmatch("[0-9]{1,9}", text) and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} came, expected a whole number from {least} to {most}"
        )
    return int(text)


def _secs(text: str) -> float:
    secs = _number(text)
    if not 0 <= secs <= _LONGEST_SECS:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} came, expected seconds from 0, such as 30"
        )
    return secs


def _mib(text: str) -> float:
    mib = _number(text)
    if not (mib == 0 or 0.01 <= mib <= _MOST_MIB):
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} came, expected MiB, such as 256, or 0 for no bound"
        )
    return mib


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
