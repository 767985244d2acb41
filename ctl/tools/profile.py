"""`ctl profile -- command`: where the time of a step goes, measured in a training that goes on unchanged.

Becomes the command, with CTL_PROFILE set: the chief's training sees it, measures once and prints.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from ctl.errors import EXIT_DONE, UsageError
from ctl.training.profile_report import NO_PATH, PROFILE_VARIABLE

PROFILE_EXAMPLE = "ctl profile -- python -m models.mnist --train_steps=500"


def main(argv: Sequence[str]) -> int:
    """Does not return where the command starts; 2 for what cannot be used."""
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    options, command = words[:split], words[split + 1 :]
    try:
        parsed = _parser().parse_args(options)
        if parsed.help:
            print(_parser().format_help(), end="")
            return EXIT_DONE
        path = _program(command)
    except UsageError as e:
        print(f"ctl profile: {e}", file=sys.stderr)
        return e.exit_code
    where = os.path.abspath(parsed.json) if parsed.json else NO_PATH
    sys.stdout.flush()
    os.execvpe(path, command, {**os.environ, PROFILE_VARIABLE: where})


def _program(command: Sequence[str]) -> str:
    """The path of the program; raises UsageError."""
    if not command:
        raise UsageError(f"no command came after `--`; expected e.g. {PROFILE_EXAMPLE}")
    path = shutil.which(command[0])
    if path is None:
        raise UsageError(
            f"{command[0]!r} is no program; expected one on PATH, or the path of an executable file. A "
            "script runs with `-- python script.py`."
        )
    return path


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; the command goes after `--`: {PROFILE_EXAMPLE}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ctl profile",
        usage="ctl profile [--json=PATH] -- command [its options]",
        description="Runs a training and measures once where the time of a step goes: waiting for input, "
        "computing,\ncommunicating, host, saving. Prints a table and what to try. The training goes on as "
        "if nothing was.",
        epilog=f"examples:\n  {PROFILE_EXAMPLE}\n"
        "  ctl profile -- ctl launch --workers=2 -- python -m models.mnist\n"
        "  ctl launch -H a:1,b:1 -- ctl profile -- python -m models.mnist",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--json", metavar="PATH", help="write the measurements to this file, too")
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    return parser
