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
_FETCHED = re.compile(
    r"git\+https://[\w.:-]+/[\w.~%+/-]+@[0-9a-f]{7,40}|https://[\w.:-]+/[\w.~%+/-]+\.(whl|tar\.gz)"
)
SOURCE_TREE = ("pyproject.toml", "README.md", "LICENSE", "ctl")  # files that a build of ctl reads
_NOT_OURS = (
    "the name ctl on PyPI belongs to another project, so `pip install ctl` would bring that one. Write "
    "--ctl=tf_ctl-0.1.0-py3-none-any.whl after `pip wheel --no-deps --wheel-dir=. SOURCE_OF_CTL`, "
    "--ctl=git+https://HOST/REPOSITORY@COMMIT, --ctl=. in the source tree of ctl, or --ctl=none if "
    "requirements.txt or the base image has it"
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
    copied = [_inside(directory, "--copy", path) for path in copy]
    copied += [p for p in _own_code(directory, program) if p not in copied]
    if not copied:
        raise UsageError(
            f"{quoted(' '.join(program))} names no module or script of this directory; expected e.g. "
            "`-- python -m trainer.task`, or --copy=PATH for what the program needs"
        )
    has = [(directory / name).is_file() for name in ("requirements.txt", "constraints.txt")]
    return Project(tuple(copied), _ctl(directory, ctl), *has)


def is_wheel(text: str) -> bool:
    """Returns True if `--ctl` names a wheel in the directory, False for one that pip downloads."""
    return text.endswith(".whl") and "://" not in text


def _own_code(directory: Path, program: Sequence[str]) -> list[str]:
    """Returns the package or script of the program, or an empty list for ctl's own modules."""
    for word, following in zip(program, [*program[1:], ""], strict=True):
        if word.endswith(".py"):
            return [_inside(directory, "the program", word).partition("/")[0]]
        top = following.partition(".")[0]
        if word != "-m" or top in ("", "ctl"):
            continue
        if not re.fullmatch(r"[A-Za-z_][\w.]*", following):
            raise UsageError(f"{quoted(following)} came after -m; expected a module such as trainer.task")
        for name in (top, f"{top}.py"):
            if (directory / name).exists():
                return [name]
        came = f"there is no {top}/ and no {top}.py in {str(directory)!r}"
        raise UsageError(f"{came}; expected the directory of your project, or --output=DIR with it")
    return []


def _inside(directory: Path, option: str, text: str) -> str:
    path = text.removeprefix("./").rstrip("/")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", path) or ".." in path.split("/"):
        expected = "one inside the directory, of letters, digits and ._-/ only, such as trainer"
        raise UsageError(f"{option} has the path {quoted(text)}; expected {expected}")
    if not (directory / path).exists():
        came = f"{option} has the path {quoted(text)}, which is not in {str(directory)!r}"
        raise UsageError(f"{came}; expected a file or directory of the project")
    return path


def _ctl(directory: Path, asked: str | None) -> str:
    """Returns the source of ctl for pip. Raises UsageError if it could resolve to another package."""
    if asked is None:
        wheels = sorted(path.name for path in directory.glob("tf_ctl-*.whl"))
        asked = "." if _is_source_tree(directory) else wheels[-1] if wheels else None
        if asked is None:
            raise UsageError(f"nothing says how ctl gets into the image, expected --ctl; {_NOT_OURS}")
    if asked == "." and not _is_source_tree(directory):
        raise UsageError(f"--ctl=. came, but {str(directory)!r} is not the source tree of ctl; {_NOT_OURS}")
    if is_wheel(asked):
        return _inside(directory, "--ctl", asked)
    if asked in (".", "none") or _FETCHED.fullmatch(asked):
        return asked
    if asked.startswith("git+https://") and not re.search("@[0-9a-f]{7,40}$", asked):
        expected = "--ctl=git+https://HOST/REPOSITORY@COMMIT with 7 to 40 digits and letters a to f"
        raise UsageError(f"--ctl={quoted(asked)} does not say which commit; expected {expected}")
    raise UsageError(f"--ctl={quoted(asked)} cannot be used; {_NOT_OURS}")


def _is_source_tree(directory: Path) -> bool:
    try:
        text = (directory / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return False
    is_named = re.search(r'^name\s*=\s*"tf-ctl"$', text, re.MULTILINE)
    return bool(is_named) and (directory / "ctl" / "deploy").is_dir()
