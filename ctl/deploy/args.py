"""A line `ctl deploy <platform> [options] -- program [its options]`, read and checked.

parser = args.Parser("slurm", "Writes a batch script.", "ctl deploy slurm --nodes=2 -- python t.py")
parser.add("size", Option("--nodes", "machines", "N", validators.whole_option(1, 100), 1))
line = args.read_arguments(parser, argv)        # None: only help was wanted, and printed
line.options.nodes, line.program, line.as_text()
"""

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ctl.deploy import secret_check, validators
from ctl.errors import UsageError
from ctl.io.console import quoted
from ctl.launch.progress import flag_value

_MAX_MESSAGE = 300  # characters of a message that repeats what came
_MAX_PROCESSES = 1000  # more is a typing mistake
_NOT_IN_FILE = {"--output": 1, "--force": 0, "--submit": 0}  # options, and the words that follow them


@dataclass(frozen=True)
class CommandLine:
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

    def as_text(self, *more: str) -> str:
        """The command line that makes the same text again; `more`: options that were looked up."""
        kept, skip = [], 0
        for word in self.words:
            name, equals, _ = word.partition("=")
            if skip:
                skip -= 1
            elif name in _NOT_IN_FILE:
                skip = 0 if equals else _NOT_IN_FILE[name]
            else:
                kept.append(word)
        program = ["--", *self.program] if self.program else []
        return shlex.join(["ctl", "deploy", self.platform, *kept, *more, *program])

    def flag(self, name: str) -> str | None:
        """The value of a flag of the program, `--name=value` or `--name value`; None without it."""
        return flag_value(name, list(self.program)) if self.program else None


class Option(NamedTuple):
    """One option of a platform.

    Attributes:
      name: such as "--workers".
      help: for a user; the default is added to it.
      metavar: "" for a switch, which takes no value.
      type: makes a value of the word.
      default: a list for what may come several times, `...` for what must come.
    """

    name: str
    help: str
    metavar: str = ""
    type: Callable[[str], Any] = str
    default: Any = None


class Parser(argparse.ArgumentParser):
    """Has the options that every platform has, and raises UsageError instead of ending the process.

    `example` is a line that works. With `needs_program` a line without a program is refused.
    """

    def __init__(self, platform: str, description: str, example: str, *, needs_program: bool = True):
        program = "-- program [its options]"
        super().__init__(
            prog=f"ctl deploy {platform}",
            usage=f"ctl deploy {platform} [options] {program if needs_program else f'[{program}]'}",
            description=description,
            epilog=f"example:\n  {example}",
            formatter_class=_wide,
            allow_abbrev=False,
            add_help=False,
        )
        self.platform, self.example, self.needs_program = platform, example, needs_program
        self.required: list[str] = []  # looked for after what is no option, which may be one misspelt
        self.add(
            "output",
            Option("--output", "write it there (default: stdout; docker: this directory)", "PATH"),
            Option("--force", "replace a file that has other content"),
        )
        self.add_argument_group("help").add_argument("-h", "--help", action="store_true", help="show this")

    def add(self, title: str, *options: Option) -> None:
        """Adds a group of options."""
        group = self.add_argument_group(title)
        for name, help, metavar, convert, default in options:
            if not metavar:
                group.add_argument(name, action="store_true", help=help)
                continue
            is_list, is_required = isinstance(default, list), default is ...
            shown = f" (default: {default})" if default and not is_list and not is_required else ""
            group.add_argument(
                name,
                help=f"{help}; repeatable" if is_list else f"{help}{shown}",
                metavar=metavar,
                type=convert,
                action="append" if is_list else "store",
                default=None if is_required else default,
            )
            if is_required:
                self.required.append(name)

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        short = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."
        example = f"; expected e.g. {self.example}" if "are required" in message else ""
        raise UsageError(f"{short}{example}; see `{self.prog} --help`")


ENV = Option("--env", "a variable, no secrets", "NAME=VALUE", validators.variable, [])


def job_options(unit: str, name: Callable[[str], str]) -> list[Option]:
    """The options of a job in containers; `unit` is what a process runs in, `name` the form of --name."""
    workers, servers = (
        validators.whole_option(1, _MAX_PROCESSES),
        validators.whole_option(0, _MAX_PROCESSES),
    )
    file_format = validators.form("yaml|json", "an invalid choice; expected yaml or json")
    return [
        Option("--image", "the training image", "IMAGE:TAG", validators.image, ...),
        Option("--workers", f"{unit}s that train, the chief among them", "N", workers, 1),
        Option("--ps", "parameter servers", "N", servers, 0),
        Option("--evaluator", f"one more {unit} evaluates the checkpoints"),
        Option("--name", "of the job (default: that of the image)", "NAME", name),
        ENV,
        Option("--timeout", "end the job after this, such as 24h", "TIME", validators.seconds),
        Option("--format", "of the file, yaml or json", "FORMAT", file_format, "yaml"),
    ]


def read_arguments(parser: Parser, argv: Sequence[str]) -> CommandLine | None:
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
    secret_check.refuse_secrets_in_options(options, parser.platform)
    secret_check.refuse_secrets_in_program(program, parser.platform)
    for word in words:
        if not word.isprintable():
            came = f"{quoted(word.partition('=')[0])} has a line break or another control character"
            raise UsageError(f"{came}; expected printable words. Put longer texts into a file of the image")
    parsed, unknown = parser.parse_known_args(options)
    if unknown:
        cure = f"see `{parser.prog} --help`; options of the program go after `--`"
        if split == len(words):
            cure = f"write the program after `--`: {parser.example}"
        name = quoted(unknown[0].partition("=")[0])
        raise UsageError(f"{name} is not an option of `{parser.prog}`; {cure}")
    missing = [name for name in parser.required if getattr(parsed, name[2:]) is None]
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    if not program and parser.needs_program:
        raise UsageError(f"no program came after `--`; expected e.g. {parser.example}")
    return CommandLine(parser.platform, parsed, tuple(program), tuple(options))


def _wide(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=100)


def _first_flag(program: Sequence[str]) -> int:
    return next((i for i, word in enumerate(program) if word.startswith("--")), len(program))
