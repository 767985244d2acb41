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
    found_project = project.find_project(directory, line.program, ctl=options.ctl, copy=options.copy)
    header = manifest.file_header(line.as_text(*([] if options.ctl else [f"--ctl={found_project.ctl}"])))
    dockerignore = manifest.fill_text(
        "dockerignore", {"context": "\n".join(f"!{path}" for path in found_project.context)}
    )
    files = {
        directory / "Dockerfile": header + render_dockerfile(line, found_project),
        directory / ".dockerignore": header + dockerignore,
    }
    output.write_files(files, force=options.force)
    advice = _advice(options, found_project.constraints)
    output.print_advice(advice, str(directory), written=list(map(str, files)), to_stdout=True)


def render_dockerfile(line: CommandLine, found_project: Project) -> str:
    """Returns the Dockerfile without the comment at its top."""
    options, ctl = line.options, found_project.ctl
    is_url = ctl not in (".", "none") and not project.is_wheel(ctl)
    constraint = " --constraint /opt/constraints.txt" if found_project.constraints else ""
    values = {
        **vars(options),
        "base": options.base or f"python:{options.python}-slim-bookworm",
        "user": None if options.root else USER_ID,
        "login_shell": "/bin/sh" if options.ssh else "/usr/sbin/nologin",
        "constraints": found_project.constraints,
        "requirements": found_project.requirements,
        "pip": f"pip install --no-cache-dir{constraint}",
        "tensorflow": f"tensorflow{'[and-cuda]' if options.gpu else ''}=={options.tensorflow}",
        "ctl_sources": " ".join(SOURCE_TREE[:-1]) if ctl == "." else None,
        "ctl_wheel": ctl if project.is_wheel(ctl) else None,
        "ctl_wheel_name": ctl.rpartition("/")[2],
        "ctl_git": ctl.startswith("git+"),
        "ctl_url": ctl if is_url else None,
        "program_copies": "\n".join(f"COPY {path} /app/{path}" for path in found_project.copied),
        "entrypoint": json.dumps(line.command),
        "cmd": json.dumps(line.args) if line.args else None,
    }
    return manifest.fill_text("Dockerfile", values)


def _advice(options: argparse.Namespace, has_constraints: bool) -> Advice:
    image = options.image or _IMAGE
    host = image.partition("/")[0]
    login = [f"gcloud auth configure-docker {host}"] if host.endswith("docker.pkg.dev") else []
    note = (
        "only TensorFlow has a fixed version; to fix all versions, run `pip freeze > constraints.txt`, "
        "remove the line of ctl, and run the same command again"
    )
    warning = "the container runs as root, which a Kubernetes manifest of ctl does not allow"
    return Advice(
        fill_in=validators.find_placeholders([image]),
        warnings=[warning] if options.root else [],
        notes=[] if has_constraints else [note],
        commands=[
            *login,
            f"docker build --platform=linux/amd64 --tag={shlex.quote(image)} {{file}}",
            f"docker push {shlex.quote(image)}",
        ],
    )


def _check_tensorflow_version(version: str) -> str:
    """Returns a full version string that ctl supports."""
    match = re.fullmatch(r"([0-9]{1,4})\.([0-9]{1,4})\.[0-9]{1,4}", version)
    if not match or (int(match[1]), int(match[2])) < _OLDEST_TENSORFLOW:
        oldest = ".".join(map(str, _OLDEST_TENSORFLOW))
        raise argparse.ArgumentTypeError(
            f"{version} is not supported; expected a full version from {oldest}.0 on, such as 2.21.0"
        )
    return version


def parser() -> args.Parser:
    """Returns the parser of the options."""
    argument_parser = args.Parser(
        "docker", "Writes a Dockerfile and a .dockerignore into a project directory.", DOCKER_EXAMPLE
    )
    python = validators.pattern_option(
        "3[.][1-9][0-9]", "not a supported version of Python; expected 3.10 or newer"
    )
    image = validators.image
    argument_parser.add(
        "the image",
        Option("--image", "name of the image in the printed commands", "IMAGE:TAG", image),
        Option("--python", "version of Python", "VERSION", python, "3.11"),
        Option("--base", "base image (default: python:VERSION-slim-bookworm)", "IMAGE", image),
        Option("--tensorflow", "version of TensorFlow", "VERSION", _check_tensorflow_version, "2.21.0"),
        Option("--gpu", "install CUDA (default: CPU only)"),
        Option("--slim", "remove TensorFlow's C++ headers (430 MB)"),
        Option("--ssh", "install OpenSSH, for elastic jobs on Kubernetes"),
        Option("--root", "run as root (default: as user 1000)"),
    )
    argument_parser.add(
        "your code",
        Option(
            "--copy",
            "additional file or directory to copy, besides the module or script of the program",
            "PATH",
            str,
            [],
        ),
        Option(
            "--ctl",
            "source of ctl: a wheel, an https or git+https URL, `.` in ctl's source tree, or none",
            "WHERE",
        ),
    )
    return argument_parser
