"""The `ctl profile -- command` command: a table of the time of a step by part, measured during training.

It replaces this process with the command and sets CTL_PROFILE. The chief reads the variable and prints the
table once.
"""

import os
import sys
from collections.abc import Sequence

from ctl.errors import EXIT_DONE, UsageError
from ctl.launch.process import check_program
from ctl.profiling.profile_report import NO_PATH, PROFILE_VARIABLE
from ctl.tools.wrapping_command import WrappingParser

PROFILE_EXAMPLE = "ctl profile -- python -m models.mnist --train_steps=500"


def main(argv: Sequence[str]) -> int:
    """Executes the command, and does not return. Returns 2 for invalid arguments."""
    try:
        options, command = _parser().read(argv)
        if options is None:
            return EXIT_DONE
        check_program(
            command[0], f"expected a program on PATH or an executable file, e.g. {PROFILE_EXAMPLE}"
        )
    except UsageError as e:
        print(f"ctl profile: {e}", file=sys.stderr)
        return e.exit_code
    json_path = os.path.abspath(options.json) if options.json else NO_PATH
    print(
        "ctl profile: the table is printed during training with ctl. A command that does not train with "
        "ctl prints no table.",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os.execvpe(command[0], command, {**os.environ, PROFILE_VARIABLE: json_path})


def _parser() -> WrappingParser:
    parser = WrappingParser(
        "ctl profile",
        PROFILE_EXAMPLE,
        usage="ctl profile [--json=PATH] -- command [its options]",
        description="Runs a training and prints once how long each part of a step takes: waiting for "
        "input, computing,\ncommunication, host and saving, followed by advice. The results of the "
        "training do not change.",
        epilog=f"examples:\n  {PROFILE_EXAMPLE}\n"
        "  ctl profile -- ctl launch --workers=2 -- python -m models.mnist\n"
        "  ctl launch -H a:1,b:1 -- ctl profile -- python -m models.mnist",
    )
    parser.add_argument("--json", metavar="PATH", help="also write the measurements to this file")
    return parser
