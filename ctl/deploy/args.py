"""A line `ctl deploy <platform> [options] -- program [its options]`, read and checked.

parser = words.parser("slurm", "Writes a batch script.", "ctl deploy slurm --nodes=2 -- python t.py")
parser.add_argument("--nodes", type=words.whole(1, 100), default=1, help="machines (default: 1)")
asked = words.read(parser, argv)        # None: only help was wanted, and printed
asked.options.nodes, asked.program, asked.line()
"""

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ctl.deploy import secret_words
from ctl.errors import EXIT_DONE, CtlError, UsageError
from ctl.io.console import quoted, say

_MOST = 300  # characters of a message that repeats what came
_ELSEWHERE = {"--output": 1, "--force": 0, "--submit": 0}  # not in the file; words that follow


@dataclass(frozen=True)
class Asked:
    """One line: options, the program, and the words as they came.

    Attributes:
      platform: the word after `ctl deploy`.
      options: what the parser made of the options.
      program: the words after `--`; none, or flags only, for that of the image.
      words: the words before `--`, as they came.
    """

    platform: str
    options: argparse.Namespace
    program: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The program without its flags: what an image's ENTRYPOINT is. Empty: the image's own."""
        return list(self.program[: _first_flag(self.program)])

    @property
    def args(self) -> list[str]:
        """The program's flags: its first word that begins with `--`, and all that follow."""
        return list(self.program[_first_flag(self.program) :])

    def line(self, *more: str) -> str:
        """The command line that makes the same text again; `more`: options that were looked up."""
        kept, skip = [], 0
        for word in self.words:
            name, _, _ = word.partition("=")
            if skip:
                skip -= 1
            elif name in _ELSEWHERE:
                skip = 0 if "=" in word else _ELSEWHERE[name]
            else:
                kept.append(word)
        program = ["--", *self.program] if self.program else []
        return shlex.join(["ctl", "deploy", self.platform, *kept, *more, *program])

    def flag(self, name: str) -> str | None:
        """The value of a flag of the program, `--name=value` or `--name value`; None without it."""
        for i, word in enumerate(self.program):
            if word.startswith(f"--{name}="):
                return word.partition("=")[2]
            if word == f"--{name}" and i + 1 < len(self.program):
                return self.program[i + 1]
        return None


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of ending the process; knows its platform and an example."""

    platform = ""
    example = ""
    needs_program = True

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        short = message if len(message) <= _MOST else message[:_MOST] + "..."
        raise UsageError(f"{short}; see `ctl deploy {self.platform} --help`")


def parser(
    platform: str,
    description: str,
    example: str,
    *,
    output: tuple[str, str] = ("FILE", "write it there (default: to stdout)"),
    needs_program: bool = True,
) -> Parser:
    """A parser with the options that every platform has: --output, --force, --help.

    Args:
      platform: the word after `ctl deploy`.
      description: what it does, one line.
      example: a line that works; shown in the help and in messages.
      output: what --output takes, and its help.
      needs_program: without one the line is refused; else the image's own program runs.
    """
    made = Parser(
        prog=f"ctl deploy {platform}",
        usage=f"ctl deploy {platform} [options] "
        + ("-- program [its options]" if needs_program else "[-- program [its options]]"),
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=_wide,
        allow_abbrev=False,
        add_help=False,
    )
    made.platform, made.example, made.needs_program = platform, example, needs_program
    group = made.add_argument_group("where it goes")
    group.add_argument("--output", metavar=output[0], help=output[1])
    group.add_argument("--force", action="store_true", help="replace a file that has other content")
    group.add_argument("-h", "--help", action="store_true", help="show this text")
    return made


def read(parser: Parser, argv: Sequence[str]) -> Asked | None:
    """The line, checked for secrets; None when only help was wanted, which is then printed.

    Raises UsageError for a word that is no option, a program that is missing, line breaks, secrets.
    """
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    options, program = words[:split], words[split + 1 :]
    if "-h" in options or "--help" in options:
        print(parser.format_help())
        return None
    # before any message that repeats a word
    secret_words.refuse_in_options(options, parser.platform)
    secret_words.refuse_in_program(program, parser.platform)
    for word in words:
        if not word.isprintable():
            raise UsageError(
                f"{quoted(word.partition('=')[0])} has a line break or another control character; expected "
                "words of printable characters. Put longer texts into a file of the image"
            )
    parsed, unknown = parser.parse_known_args(options)
    if unknown:
        cure = (
            f"write the program after `--`: {parser.example}"
            if split == len(words)
            else f"see `ctl deploy {parser.platform} --help`; options of the program go after `--`"
        )
        raise UsageError(
            f"{quoted(unknown[0].partition('=')[0])} is not an option of `ctl deploy "
            f"{parser.platform}`; {cure}"
        )
    if not program and parser.needs_program:
        raise UsageError(f"no program came after `--`; expected e.g. {parser.example}")
    return Asked(parser.platform, parsed, tuple(program), tuple(options))


def guarded(platform: str, work: Callable[[], int | None]) -> int:
    """Runs `work`; an error of ctl is one sentence on stderr and its exit code, 2 for a mistake."""
    try:
        return work() or EXIT_DONE
    except CtlError as e:
        say(str(e), by=f"ctl deploy {platform}")
        return e.exit_code


def whole(least: int, most: int) -> Callable[[str], int]:
    """A type for options: a whole number from `least` to `most`."""

    def check(text: str) -> int:
        if not (re.fullmatch("[0-9]{1,9}", text) and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(
                f"{quoted(text)} came, expected a whole number from {least} to {most}"
            )
        return int(text)

    return check


def _wide(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=100)


def _first_flag(program: Sequence[str]) -> int:
    return next((i for i, word in enumerate(program) if word.startswith("--")), len(program))
