"""Main function of the `ctl` command, which passes the arguments to a subcommand.

A subcommand is a module with `main(argv) -> exit code`. It is imported only when it is run, so `ctl --help`
is instant and does not import TensorFlow.
"""

import importlib
import sys
from collections.abc import Sequence

from ctl.errors import EXIT_DONE, EXIT_USAGE
from ctl.io.console import ignore_closed_stdout
from ctl.version import __version__

# name -> (module, one-line description)
_SUBCOMMANDS = {
    "deploy": ("ctl.deploy.command", "write what a platform needs to run a job"),
    "doctor": ("ctl.tools.doctor", "print what this process understands of its cluster"),
    "inspect": ("ctl.tools.inspect", "show the checkpoints of a run"),
    "launch": ("ctl.launch.cli", "start the workers of one job, and look after them"),
    "profile": ("ctl.tools.profile", "show where the time of a step goes"),
    "sweep": ("ctl.tools.sweep", "run a training with several values of its flags"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `ctl <subcommand> …` and returns its exit code. `argv` defaults to the command line."""
    code = EXIT_DONE
    with ignore_closed_stdout():
        code = _run(list(sys.argv[1:] if argv is None else argv))
    return code


def _run(words: list[str]) -> int:
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        print(_help())
        return EXIT_DONE
    if name == "--version":
        print(f"ctl {__version__}")
        return EXIT_DONE
    if name not in _SUBCOMMANDS:
        came = f"there is no subcommand {name!r}" if name else "no subcommand was given"
        known = ", ".join(_SUBCOMMANDS)
        print(f"ctl: {came}; expected one of: {known}. See `ctl --help`.", file=sys.stderr)
        return EXIT_USAGE
    module, _ = _SUBCOMMANDS[name]
    return importlib.import_module(module).main(words[1:])


def _help() -> str:
    width = max(map(len, _SUBCOMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in _SUBCOMMANDS.items())
    return (
        "usage: ctl <subcommand> [options]\n\n"
        "Custom training loops for TensorFlow 2, on one device or on many.\n\n"
        f"subcommands:\n{listed}\n\n"
        "options:\n"
        "  -h, --help  show this text; `ctl <subcommand> --help` shows a subcommand's\n"
        "  --version   show the version\n"
    )
