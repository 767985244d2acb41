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
    "deploy": ("ctl.deploy.command", "write the configuration of a job for a platform"),
    "doctor": ("ctl.tools.doctor", "print the cluster configuration that this process detects"),
    "inspect": ("ctl.tools.inspect", "show the checkpoints of a run"),
    "launch": ("ctl.launch.cli", "start, supervise and restart the workers of a job"),
    "profile": ("ctl.tools.profile", "measure the parts of a training step"),
    "sweep": ("ctl.tools.sweep", "train with several values of flags"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `ctl <subcommand> …` and returns its exit code. `argv` defaults to the command line."""
    code = EXIT_DONE
    with ignore_closed_stdout():
        code = _run(list(sys.argv[1:] if argv is None else argv))
    return code


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(_help())
        return EXIT_DONE
    if name == "--version":
        print(f"ctl {__version__}")
        return EXIT_DONE
    if name not in _SUBCOMMANDS:
        problem = f"there is no subcommand {name!r}" if name else "the subcommand is missing"
        print(
            f"ctl: {problem}; expected one of: {', '.join(_SUBCOMMANDS)}. See `ctl --help`.",
            file=sys.stderr,
        )
        return EXIT_USAGE
    module, _ = _SUBCOMMANDS[name]
    return importlib.import_module(module).main(arguments[1:])


def _help() -> str:
    width = max(map(len, _SUBCOMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in _SUBCOMMANDS.items())
    return (
        "usage: ctl <subcommand> [options]\n\n"
        "Custom training loops for TensorFlow 2, on one or several devices and machines.\n\n"
        f"subcommands:\n{listed}\n\n"
        "options:\n"
        "  -h, --help  show this help; `ctl <subcommand> --help` shows the options of a subcommand\n"
        "  --version   show the version\n"
    )
