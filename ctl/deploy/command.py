"""The `ctl deploy` command: finds the platform and hands the rest of the line to it.

A platform is a module with `main(argv) -> exit code`, imported only when it is asked for.
"""

import importlib
import sys
from collections.abc import Sequence

from ctl.errors import EXIT_DONE, EXIT_USAGE

# name -> (module, what it writes in one line)
PLATFORMS = {
    "docker": ("ctl.deploy.docker.command", "a Dockerfile and a .dockerignore"),
    "vertex": ("ctl.deploy.vertex.command", "a job for Vertex AI: training, or tuning"),
    "kubernetes": ("ctl.deploy.kubernetes.command", "a Job, TFJob or TrainJob with what it needs"),
    "slurm": ("ctl.deploy.slurm", "a batch script"),
}


def main(argv: Sequence[str]) -> int:
    """Runs `ctl deploy <platform> …` with the words after "deploy" and returns its exit code."""
    words = list(argv)
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        print(_help())
        return EXIT_DONE
    if name not in PLATFORMS:
        came = f"there is no platform {name!r}" if name else "no platform was given"
        known = ", ".join(PLATFORMS)
        print(f"ctl deploy: {came}; expected one of: {known}. See `ctl deploy --help`.", file=sys.stderr)
        return EXIT_USAGE
    module, _ = PLATFORMS[name]
    return importlib.import_module(module).main(words[1:])


def _help() -> str:
    width = max(map(len, PLATFORMS))
    listed = "\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in PLATFORMS.items())
    return (
        "usage: ctl deploy <platform> [options] -- program [its options]\n\n"
        "Writes what a platform needs to run the program. Sends nothing, unless --submit is given.\n\n"
        f"platforms:\n{listed}\n\n"
        "options:\n"
        "  -h, --help  show this text; `ctl deploy <platform> --help` shows a platform's\n"
    )
