"""The `ctl deploy docker` command: a Dockerfile and a .dockerignore beside your program."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from ctl.deploy import args, output, texts, validators
from ctl.deploy.args import Asked
from ctl.deploy.docker import dockerfile, project
from ctl.deploy.output import Advice
from ctl.errors import UsageError

EXAMPLE = (
    "ctl deploy docker --image=us-central1-docker.pkg.dev/PROJECT/flower-app/flowers:1 "
    "-- python -m trainer.task"
)
_IMAGE = "REGION-docker.pkg.dev/PROJECT/REPOSITORY/IMAGE:1"
_PYTHONS = ("3.10", "3.11", "3.12", "3.13")
_OLDEST, _FIRST_ON_313 = (2, 16), (2, 20)


def main(argv: Sequence[str]) -> int:
    """Writes both files; returns 0, or 2 after one sentence on stderr, when nothing was written."""
    return args.guarded("docker", lambda: _main(argv))


def _main(argv: Sequence[str]) -> None:
    asked = args.read(parser(), argv)
    if asked is None:
        return
    options = asked.options
    directory = Path(options.output or ".")
    if not asked.command:
        raise UsageError(
            f"the program begins with a flag, {asked.program[0].partition('=')[0]}; expected what the "
            "image is to run, such as `-- python -m trainer.task`"
        )
    recipe = _recipe(options)
    found = project.look(directory, asked.program, ctl=options.ctl, copy=options.copy)
    image = validators.image(options.image) if options.image else _IMAGE
    line = _line(asked, found)
    files = {
        directory / "Dockerfile": texts.header(line)
        + dockerfile.dockerfile(recipe, found, asked.command, asked.args),
        directory / ".dockerignore": texts.header(line) + dockerfile.dockerignore(found),
    }
    output.write(files, force=options.force)
    output.tell(
        _advice(found, recipe, image), str(directory), to_stdout=True, written=list(map(str, files))
    )


def _line(asked: Asked, found: project.Project) -> str:
    """The line, with where ctl was found spelled out."""
    return asked.line(*([] if asked.options.ctl else [f"--ctl={found.ctl}"]))


def _recipe(options: argparse.Namespace) -> dockerfile.Recipe:
    version = validators.version("--tensorflow", options.tensorflow)
    if version[:2] < _OLDEST or len(version) != 3:
        raise UsageError(
            f"--tensorflow={options.tensorflow} cannot be used; expected a full version from "
            f"{'.'.join(map(str, _OLDEST))}.0 on, such as 2.21.0"
        )
    if options.python not in _PYTHONS:
        raise UsageError(f"--python={options.python} came, expected one of {', '.join(_PYTHONS)}")
    if options.python == "3.13" and version[:2] < _FIRST_ON_313:
        raise UsageError(
            f"--tensorflow={options.tensorflow} has no packages for Python 3.13; expected 2.20.0 or "
            "newer. Write --python=3.12"
        )
    base = f"python:{options.python}-slim-bookworm"
    if options.base:
        base = validators.image(options.base, "--base")
    return dockerfile.Recipe(
        base, options.tensorflow, gpu=options.gpu, root=options.root, slim=options.slim
    )


def _advice(found: project.Project, recipe: dockerfile.Recipe, image: str) -> Advice:
    host = image.partition("/")[0]
    login = [f"gcloud auth configure-docker {host}"] if host.endswith("docker.pkg.dev") else []
    notes = []
    if found.constraints == "none":
        notes.append(
            "only TensorFlow has a fixed version; `pip freeze > constraints.txt`, without the line of ctl, "
            "and the same command again fix all others"
        )
    warnings = []
    if recipe.root:
        warnings.append("the container runs as root; a Kubernetes manifest of ctl refuses that")
    return Advice(
        fill_in=validators.blanks([image]),
        warnings=warnings,
        notes=notes,
        commands=[
            *login,
            f"docker build --platform=linux/amd64 --tag={shlex.quote(image)} {{file}}",
            f"docker push {shlex.quote(image)}",
        ],
    )


def parser() -> args.Parser:
    """The parser of the options."""
    made = args.parser(
        "docker",
        "Writes a Dockerfile and a .dockerignore into a project directory.",
        EXAMPLE,
        output=("DIR", "the project directory (default: this one)"),
    )
    image = made.add_argument_group("the image")
    image.add_argument(
        "--image",
        metavar="IMAGE:TAG",
        help="how it is called; only for the commands that are printed (default: to be filled in)",
    )
    image.add_argument(
        "--python", default="3.11", metavar="VERSION", help=f"one of {', '.join(_PYTHONS)} (default: 3.11)"
    )
    image.add_argument(
        "--base",
        metavar="IMAGE",
        help="another image to begin with, also by digest (default: python:VERSION-slim-bookworm)",
    )
    image.add_argument("--tensorflow", default="2.21.0", metavar="VERSION", help="(default: 2.21.0)")
    image.add_argument("--gpu", action="store_true", help="with CUDA (default: for CPUs)")
    image.add_argument(
        "--slim", action="store_true", help="without TensorFlow's C++ headers, 430 MB (default: whole)"
    )
    image.add_argument("--root", action="store_true", help="run as root (default: as user 1000)")
    code = made.add_argument_group("your code")
    code.add_argument(
        "--copy",
        action="append",
        default=[],
        metavar="PATH",
        help="copy this, too; repeatable (default: the module or script of the program)",
    )
    code.add_argument(
        "--ctl",
        metavar="WHERE",
        help="a wheel in the directory, a git+https or https URL, "
        "`.` in ctl's source tree, or none (default: looked up)",
    )
    return made
