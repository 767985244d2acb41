"""The `ctl deploy docker` command: a Dockerfile and a .dockerignore in the project directory.

Layers that change least come first, so a change of the program rebuilds one small layer. Python is
process 1 in its container: it receives SIGTERM directly, saves a checkpoint and ends with exit code 143.
"""

import argparse
import json
import re
import shlex
from pathlib import Path

from ctl.deploy import args, manifest, output, validators
from ctl.deploy.args import CommandLine, Option
from ctl.deploy.docker import project
from ctl.deploy.docker.project import SOURCE_TREE, Project
from ctl.deploy.output import Advice
from ctl.errors import UsageError

DOCKER_EXAMPLE = (
    "ctl deploy docker --image=us-central1-docker.pkg.dev/PROJECT/flower-app/flowers:1 "
    "-- python -m trainer.task"
)
USER_ID = 1000
_IMAGE = "REGION-docker.pkg.dev/PROJECT/REPOSITORY/IMAGE:1"
_OLDEST_TENSORFLOW = (2, 16)


def write(line: CommandLine) -> None:
    """Writes both files."""
    options = line.options
    directory = Path(options.output or ".")
    if not line.command:
        flag = line.program[0].partition("=")[0]
        raise UsageError(f"the program begins with a flag, {flag}; expected e.g. `-- python train.py`")
    found = project.find_project(directory, line.program, ctl=options.ctl, copy=options.copy)
    top = manifest.file_header(line.as_text(*([] if options.ctl else [f"--ctl={found.ctl}"])))
    ignored = manifest.text_from(
        "dockerignore", {"context": "\n".join(f"!{path}" for path in found.context)}
    )
    files = {
        directory / "Dockerfile": top + dockerfile(line, found),
        directory / ".dockerignore": top + ignored,
    }
    output.write_files(files, force=options.force)
    advice = _advice(options, found.constraints)
    output.tell_written(advice, str(directory), written=list(map(str, files)), to_stdout=True)


def dockerfile(line: CommandLine, found: Project) -> str:
    """Returns the Dockerfile without the comment at its top."""
    options, ctl = line.options, found.ctl
    is_url = ctl not in (".", "none") and not project.is_wheel(ctl)
    constraint = " --constraint /opt/constraints.txt" if found.constraints else ""
    values = {
        **vars(options),
        "base": options.base or f"python:{options.python}-slim-bookworm",
        "user": None if options.root else USER_ID,
        "constraints": found.constraints,
        "requirements": found.requirements,
        "pip": f"pip install --no-cache-dir{constraint}",
        "tensorflow": f"tensorflow{'[and-cuda]' if options.gpu else ''}=={options.tensorflow}",
        "ctl_sources": " ".join(SOURCE_TREE[:-1]) if ctl == "." else None,
        "ctl_wheel": ctl if project.is_wheel(ctl) else None,
        "ctl_wheel_name": ctl.rpartition("/")[2],
        "ctl_git": ctl.startswith("git+"),
        "ctl_url": ctl if is_url else None,
        "program_copies": "\n".join(f"COPY {path} /app/{path}" for path in found.copied),
        "entrypoint": json.dumps(line.command),
        "cmd": json.dumps(line.args) if line.args else None,
    }
    return manifest.text_from("Dockerfile", values)


def _advice(options: argparse.Namespace, has_constraints: bool) -> Advice:
    image = options.image or _IMAGE
    host = image.partition("/")[0]
    login = [f"gcloud auth configure-docker {host}"] if host.endswith("docker.pkg.dev") else []
    note = (
        "only TensorFlow has a fixed version; `pip freeze > constraints.txt`, without the line of ctl, and "
        "the same command again fix all others"
    )
    warning = "the container runs as root; a Kubernetes manifest of ctl refuses that"
    return Advice(
        fill_in=validators.blanks([image]),
        warnings=[warning] if options.root else [],
        notes=[] if has_constraints else [note],
        commands=[
            *login,
            f"docker build --platform=linux/amd64 --tag={shlex.quote(image)} {{file}}",
            f"docker push {shlex.quote(image)}",
        ],
    )


def _tensorflow(word: str) -> str:
    """Returns a full version string that ctl supports."""
    found = re.fullmatch(r"([0-9]{1,4})\.([0-9]{1,4})\.[0-9]{1,4}", word)
    if not found or (int(found[1]), int(found[2])) < _OLDEST_TENSORFLOW:
        oldest = ".".join(map(str, _OLDEST_TENSORFLOW))
        raise argparse.ArgumentTypeError(
            f"{word} cannot be used; expected a full version from {oldest}.0 on, such as 2.21.0"
        )
    return word


def parser() -> args.Parser:
    """Returns the parser of the options."""
    made = args.Parser(
        "docker", "Writes a Dockerfile and a .dockerignore into a project directory.", DOCKER_EXAMPLE
    )
    python = validators.form("3[.][1-9][0-9]", "no version of Python for ctl; expected 3.10 or newer")
    image = validators.image
    made.add(
        "the image",
        Option("--image", "its name in the commands that are printed", "IMAGE:TAG", image),
        Option("--python", "the version", "VERSION", python, "3.11"),
        Option("--base", "the base image (default: python:VERSION-slim-bookworm)", "IMAGE", image),
        Option("--tensorflow", "the version", "VERSION", _tensorflow, "2.21.0"),
        Option("--gpu", "with CUDA (default: for CPUs)"),
        Option("--slim", "without TensorFlow's C++ headers, 430 MB (default: whole)"),
        Option("--root", "run as root (default: as user 1000)"),
    )
    made.add(
        "your code",
        Option("--copy", "copy this, too, beside the module or script of the program", "PATH", str, []),
        Option("--ctl", "a wheel, an https or git+https URL, `.` in ctl's source tree, or none", "WHERE"),
    )
    return made
