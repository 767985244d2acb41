"""The `ctl deploy` command.

Each platform is a module that is imported on demand. Its `parser()` creates the parser of the options, and
its `write(line)` writes the files of a command line.
"""

import argparse
import importlib
from collections.abc import Sequence

from ctl.deploy import args
from ctl.errors import EXIT_DONE, EXIT_USAGE, CtlError, UsageError
from ctl.io.console import print_message

# name -> (module, summary of its output)
PLATFORMS = {
    "docker": ("ctl.deploy.docker.command", "a Dockerfile and a .dockerignore"),
    "vertex": ("ctl.deploy.vertex.command", "a training or tuning job for Vertex AI"),
    "kubernetes": ("ctl.deploy.kubernetes.command", "a Job, TFJob or TrainJob with its dependencies"),
    "slurm": ("ctl.deploy.slurm", "a batch script"),
}
_HELP = """\
usage: ctl deploy <platform> [options] -- program [its options]

Writes the files with which a platform runs the program. Sends a request only with --submit.

platforms:
{platforms}

options:
  -h, --help  show this text; see also `ctl deploy <platform> --help`
"""


def main(argv: Sequence[str]) -> int:
    """Runs `ctl deploy <platform> ...` with the arguments after "deploy" and returns its exit code.

    An error is printed to stderr. A usage error returns exit code 2 and writes no file.
    """
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(
            _HELP.format(
                platforms="\n".join(f"  {k:<10}  {summary}" for k, (_, summary) in PLATFORMS.items())
            )
        )
        return EXIT_DONE
    try:
        if name not in PLATFORMS:
            problem = f"unknown platform {name!r}" if name else "no platform was given"
            raise UsageError(
                f"{problem}; expected one of: {', '.join(PLATFORMS)}. See `ctl deploy --help`."
            )
        module = importlib.import_module(PLATFORMS[name][0])
        line = args.read_arguments(module.parser(), argv[1:])
        if line is not None:
            module.write(line)
    except (CtlError, argparse.ArgumentTypeError) as e:
        print_message(str(e), program=f"ctl deploy {name}" if name in PLATFORMS else "ctl deploy")
        return getattr(e, "exit_code", EXIT_USAGE)
    return EXIT_DONE
