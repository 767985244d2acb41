"""The `ctl launch` command: reads the line, checks it, and hands it to the supervisor."""

import argparse
import math
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ctl.errors import EXIT_DONE, UsageError
from ctl.launch.supervisor import Roles, launch
from ctl.launch.watching import say

_EXAMPLE = "ctl launch --workers=2 -- python -m models.mnist --model_dir=/tmp/mnist"
_MODEL_DIR = re.compile(r"--?model_dir(?:=(.*))?", re.DOTALL)


def main(argv: Sequence[str]) -> int:
    """Runs `ctl launch` with the words after "launch" and returns its exit code.

    What cannot be used is one sentence on stderr and exit code 2.
    """
    try:
        options, command = _read(list(argv))
        if options is None:
            return EXIT_DONE
        _check_command(command)
        log_dir = _log_dir(options.log_dir, command)
        if os.environ.get("TF_CONFIG"):
            say("TF_CONFIG was set already; each worker gets a new one instead")
        roles = Roles(
            workers=options.workers,
            chief=options.chief or options.ps > 0,
            ps=options.ps,
            evaluator=options.evaluator,
        )
        if roles.chief and not options.chief:
            say("parameter servers need a coordinator: a chief is started as well (--chief)")
        count = roles.count
        say(f"starting {count} process{'es' if count > 1 else ''}, logs in {log_dir}")
        return launch(
            command,
            roles=roles,
            host=options.host,
            log_dir=log_dir,
            grace_secs=options.grace_secs,
        )
    except UsageError as e:
        say(str(e))
        return e.exit_code


def _read(argv: list[str]) -> tuple[argparse.Namespace | None, list[str]]:
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
            f"write the command after `--`: {_EXAMPLE}"
            if split == len(argv)
            else ("see `ctl launch --help`; options of the command go after `--`")
        )
        raise UsageError(f"{unknown[0]!r} is not an option of the launcher; {cure}")
    if not command:
        raise UsageError(f"no command came after `--`; expected e.g. {_EXAMPLE}")
    return parsed, command


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ctl launch",
        usage="ctl launch [options] -- command [its options]",
        description="Runs a command once per worker on this machine, with a TF_CONFIG for each. "
        "The first to fail decides the exit code, and ends the others.",
        epilog=f"example:\n  {_EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    _add_job(parser)
    logs = parser.add_argument_group("logs")
    logs.add_argument(
        "--log_dir",
        metavar="DIR",
        help="where job_0.log, job_1.log, ... go, the chief's first, and ps_0.log, evaluator_0.log "
        "(default: workers/ in the command's --model_dir, or a new temporary directory)",
    )
    ending = parser.add_argument_group("ending")
    ending.add_argument(
        "--grace_secs",
        type=_secs,
        default=30.0,
        metavar="SECS",
        help="seconds from SIGTERM (or a Ctrl-C passed on) to SIGKILL, and for workers to end "
        "once the chief is done (default: 30)",
    )
    about = parser.add_argument_group("about")
    about.add_argument("-h", "--help", action="store_true", help="show this text")
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("the job")
    job.add_argument(
        "--workers",
        type=_workers,
        default=1,
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
        default="127.0.0.1",
        metavar="ADDRESS",
        help="this machine's address in TF_CONFIG, IPv4 (default: 127.0.0.1)",
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `ctl launch --help`")


def _workers(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} came, expected a whole number from 1")
    return int(text)


def _secs(text: str) -> float:
    try:
        secs = float(text)
    except ValueError:
        secs = math.nan
    if not 0 <= secs < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} came, expected seconds from 0, such as 30")
    return secs


def _check_command(command: list[str]) -> None:
    program = command[0]
    if shutil.which(program) is None:
        where = "cannot be run" if os.path.exists(program) else "was not found"
        raise UsageError(
            f"the command {program!r} {where}; expected a program on PATH or the path of an "
            "executable file. A script runs with `-- python script.py`"
        )


def _log_dir(asked: str | None, command: list[str]) -> Path:
    """Creates the directory for the logs if need be; UsageError when it cannot be written."""
    model_dir = _model_dir(command)
    if asked:
        log_dir = Path(asked)
    elif model_dir and "://" not in model_dir:  # an object store's address is no local path
        log_dir = Path(model_dir) / "workers"
    else:
        return Path(tempfile.mkdtemp(prefix="ctl-launch-"))
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        (log_dir / "job_0.log").open("ab").close()
    except OSError as e:
        raise UsageError(
            f"logs cannot be written to {str(log_dir)!r} ({e.strerror}); give a directory that "
            "can be written with --log_dir=DIR"
        ) from None
    return log_dir


def _model_dir(command: list[str]) -> str | None:
    """The value of the command's last --model_dir, with `=` or as the next word."""
    found = None
    for word, following in zip(command, [*command[1:], None], strict=True):
        match = _MODEL_DIR.fullmatch(word)
        if match:
            found = following if match[1] is None else match[1]
    return found
