"""Contents of a project directory that are copied into an image.

found = project.find_project(Path("."), ("python", "-m", "trainer.task"), ctl=None, copy=[])
found.copied                # ("trainer",)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ctl.errors import UsageError
from ctl.io.console import quoted

# no user in the URL, and no character that a shell interprets
_URL = re.compile(
    r"git\+https://[\w.:-]+/[\w.~%+/-]+@[0-9a-f]{7,40}|https://[\w.:-]+/[\w.~%+/-]+\.(whl|tar\.gz)"
)
SOURCE_TREE = ("pyproject.toml", "README.md", "LICENSE", "ctl")  # files that a build of ctl reads
_CTL_SOURCES = (
    "the name ctl on PyPI belongs to another project, so `pip install ctl` would install that project. Use "
    "--ctl=tf_ctl-0.1.0-py3-none-any.whl after `pip wheel --no-deps --wheel-dir=. SOURCE_OF_CTL`, "
    "--ctl=git+https://HOST/REPOSITORY@COMMIT, --ctl=. in the source tree of ctl, or --ctl=none if "
    "requirements.txt or the base image contains ctl"
)


@dataclass(frozen=True)
class Project:
    """Files to copy and packages to install. Paths are relative to the directory.

    Attributes:
      copied: Directories and files of the program.
      ctl: ".", a wheel, a URL for pip, or "none".
      requirements: True if there is a requirements.txt.
      constraints: True if there is a constraints.txt, a file of exact versions.
    """

    copied: tuple[str, ...]
    ctl: str
    requirements: bool
    constraints: bool

    @property
    def context(self) -> list[str]:
        """All paths that the build reads."""
        files = ["requirements.txt"] * self.requirements + ["constraints.txt"] * self.constraints
        ctl = list(SOURCE_TREE) if self.ctl == "." else [self.ctl] * is_wheel(self.ctl)
        return list(dict.fromkeys([*files, *ctl, *self.copied]))


def find_project(
    directory: Path, program: Sequence[str], *, ctl: str | None, copy: Sequence[str]
) -> Project:
    """Finds the program's code, requirements.txt, constraints.txt and the source of ctl.

    Raises UsageError if code does not exist or the source of ctl is not specified.
    """
    copied = [_check_path(directory, "--copy", path) for path in copy]
    copied += [path for path in _find_program_code(directory, program) if path not in copied]
    if not copied:
        raise UsageError(
            f"{quoted(' '.join(program))} contains no module or script of this directory; expected e.g. "
            "`-- python -m trainer.task`, or --copy=PATH for the files of the program"
        )
    has = [(directory / name).is_file() for name in ("requirements.txt", "constraints.txt")]
    return Project(tuple(copied), _find_ctl_source(directory, ctl), *has)


def is_wheel(text: str) -> bool:
    """Returns True if `--ctl` names a wheel in the directory, False for one that pip downloads."""
    return text.endswith(".whl") and "://" not in text


def _find_program_code(directory: Path, program: Sequence[str]) -> list[str]:
    """Returns the package or script of the program, or an empty list for ctl's own modules."""
    for argument, next_argument in zip(program, [*program[1:], ""], strict=True):
        if argument.endswith(".py"):
            return [_check_path(directory, "the program", argument).partition("/")[0]]
        package = next_argument.partition(".")[0]
        if argument != "-m" or package in ("", "ctl"):
            continue
        if not re.fullmatch(r"[A-Za-z_][\w.]*", next_argument):
            raise UsageError(
                f"{quoted(next_argument)} after -m is not a module; expected e.g. trainer.task"
            )
        for name in (package, f"{package}.py"):
            if (directory / name).exists():
                return [name]
        problem = f"there is no {package}/ and no {package}.py in {str(directory)!r}"
        raise UsageError(f"{problem}; expected the directory of your project, or --output=DIR with it")
    return []


def _check_path(directory: Path, option: str, text: str) -> str:
    path = text.removeprefix("./").rstrip("/")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", path) or ".." in path.split("/"):
        expected = "a path inside the directory, of letters, digits and ._-/ only, such as trainer"
        raise UsageError(f"{option} has the path {quoted(text)}; expected {expected}")
    if not (directory / path).exists():
        problem = f"{option} has the path {quoted(text)}, which is not in {str(directory)!r}"
        raise UsageError(f"{problem}; expected a file or directory of the project")
    return path


def _find_ctl_source(directory: Path, requested: str | None) -> str:
    """Returns the source of ctl for pip. Raises UsageError if it could resolve to another package."""
    if requested is None:
        wheels = sorted(path.name for path in directory.glob("tf_ctl-*.whl"))
        requested = "." if _is_source_tree(directory) else wheels[-1] if wheels else None
        if requested is None:
            raise UsageError(f"the source of ctl is unknown; expected --ctl: {_CTL_SOURCES}")
    if requested == "." and not _is_source_tree(directory):
        raise UsageError(
            f"--ctl=. was given, but {str(directory)!r} is not the source tree of ctl: {_CTL_SOURCES}"
        )
    if is_wheel(requested):
        return _check_path(directory, "--ctl", requested)
    if requested in (".", "none") or _URL.fullmatch(requested):
        return requested
    if requested.startswith("git+https://") and not re.search("@[0-9a-f]{7,40}$", requested):
        expected = "--ctl=git+https://HOST/REPOSITORY@COMMIT with 7 to 40 digits and letters a to f"
        raise UsageError(f"--ctl={quoted(requested)} does not specify a commit; expected {expected}")
    raise UsageError(f"--ctl={quoted(requested)} is not supported: {_CTL_SOURCES}")


def _is_source_tree(directory: Path) -> bool:
    try:
        text = (directory / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return False
    is_named = re.search(r'^name\s*=\s*"tf-ctl"$', text, re.MULTILINE)
    return bool(is_named) and (directory / "ctl" / "deploy").is_dir()
