"""Parser for command lines `ctl deploy <platform> [options] -- program [its options]`.

parser = args.Parser("slurm", "Writes a batch script.", "ctl deploy slurm --nodes=2 -- python t.py")
parser.add("size", Option("--nodes", "machines", "N", validators.integer_option(1, 100), 1))
line = args.read_arguments(parser, argv)        # None if it printed the help
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

_MAX_MESSAGE = 300  # length limit of an error message that repeats arguments (characters)
_MAX_PROCESSES = 1000  # a larger number is a typing mistake
_OMITTED_OPTIONS = {"--output": 1, "--force": 0, "--submit": 0}  # option -> number of separate values


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line: options, program and the original arguments.

    Attributes:
      platform: The argument after `ctl deploy`.
      options: The parsed options.
      program: The arguments after `--`. Empty, or flags only, for the program of the image.
      arguments: The arguments before `--`, unchanged.
    """

    platform: str
    options: argparse.Namespace
    program: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The program without its flags: the ENTRYPOINT of the image. Empty: the image's own ENTRYPOINT."""
        return list(self.program[: _first_flag_index(self.program)])

    @property
    def args(self) -> list[str]:
        """The program's flags: its first argument that begins with `--`, and all later ones."""
        return list(self.program[_first_flag_index(self.program) :])

    def as_text(self, *extra_options: str) -> str:
        """Returns the command line that generates the same text.

        Args:
          *extra_options: Inferred options to add.
        """
        arguments, num_skipped = [], 0
        for argument in self.arguments:
            name, equals, _ = argument.partition("=")
            if num_skipped:
                num_skipped -= 1
            elif name in _OMITTED_OPTIONS:
                num_skipped = 0 if equals else _OMITTED_OPTIONS[name]
            else:
                arguments.append(argument)
        program = ["--", *self.program] if self.program else []
        return shlex.join(["ctl", "deploy", self.platform, *arguments, *extra_options, *program])

    def flag(self, name: str) -> str | None:
        """Returns the value of a program flag, `--name=value` or `--name value`, or None without it."""
        return flag_value(name, list(self.program)) if self.program else None


class Option(NamedTuple):
    """An option of a platform.

    Attributes:
      name: Name, such as "--workers".
      help: Help text. The default is appended to it.
      metavar: Name of the value in the help. "" for a switch, which takes no value.
      type: Converter of the value.
      default: Default value. A list for a repeatable option, `...` for a required one.
    """

    name: str
    help: str
    metavar: str = ""
    type: Callable[[str], Any] = str
    default: Any = None


class Parser(argparse.ArgumentParser):
    """Argument parser with the options of all platforms. Raises UsageError instead of ending the process.

    `example` is a valid command line. With `needs_program` a program is required.
    """

    def __init__(self, platform: str, description: str, example: str, *, needs_program: bool = True):
        program = "-- program [its options]"
        super().__init__(
            prog=f"ctl deploy {platform}",
            usage=f"ctl deploy {platform} [options] {program if needs_program else f'[{program}]'}",
            description=description,
            epilog=f"example:\n  {example}",
            formatter_class=_wide_formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.platform, self.example, self.needs_program = platform, example, needs_program
        self.required: list[str] = []  # checked after unknown options: one may be misspelt
        output = "output file (default: stdout)"
        if platform == "docker":
            output = "directory of the project (default: the current directory)"
        self.add(
            "output",
            Option("--output", output, "PATH"),
            Option("--force", "replace an existing file with different content"),
        )
        self.add_argument_group("help").add_argument(
            "-h", "--help", action="store_true", help="show this text"
        )

    def add(self, title: str, *options: Option) -> None:
        """Adds a group of options."""
        group = self.add_argument_group(title)
        for name, help, metavar, converter, default in options:
            if not metavar:
                group.add_argument(name, action="store_true", help=help)
                continue
            is_list, is_required = isinstance(default, list), default is ...
            default_text = f" (default: {default})" if default and not is_list and not is_required else ""
            group.add_argument(
                name,
                help=f"{help}; repeatable" if is_list else f"{help}{default_text}",
                metavar=metavar,
                type=converter,
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


ENV = Option("--env", "environment variable, not a secret", "NAME=VALUE", validators.variable, [])


def job_options(unit: str, name: Callable[[str], str]) -> list[Option]:
    """Returns the options of a container job.

    Args:
      unit: Unit that runs a process, such as "pod".
      name: Converter of --name.
    """
    workers, servers = (
        validators.integer_option(1, _MAX_PROCESSES),
        validators.integer_option(0, _MAX_PROCESSES),
    )
    file_format = validators.pattern_option("yaml|json", "an invalid choice; expected yaml or json")
    return [
        Option("--image", "the training image", "IMAGE:TAG", validators.image, ...),
        Option("--workers", f"number of training {unit}s, including the chief", "N", workers, 1),
        Option("--ps", "number of parameter servers", "N", servers, 0),
        Option("--evaluator", f"add a {unit} that evaluates the checkpoints"),
        Option("--name", "name of the job (default: that of the image)", "NAME", name),
        ENV,
        Option("--timeout", "time limit of the job, such as 24h", "TIME", validators.seconds),
        Option("--format", "file format, yaml or json", "FORMAT", file_format, "yaml"),
    ]


def read_arguments(parser: Parser, argv: Sequence[str]) -> CommandLine | None:
    """Parses a command line and checks it for secrets. Prints the help and returns None if it is requested.

    Raises UsageError for an unknown option, a missing program, a control character or a secret.
    """
    arguments = list(argv)
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    options, program = arguments[:separator], arguments[separator + 1 :]
    if "-h" in options or "--help" in options:
        print(parser.format_help())
        return None
    # before any message that repeats an argument
    secret_check.refuse_secrets_in_options(options, parser.platform)
    secret_check.refuse_secrets_in_program(program, parser.platform)
    for argument in arguments:
        if not argument.isprintable():
            problem = f"{quoted(argument.partition('=')[0])} has a line break or another control character"
            raise UsageError(
                f"{problem}; expected printable characters. Put longer texts into a file of the image"
            )
    parsed_options, unknown = parser.parse_known_args(options)
    if unknown and unknown[0].partition("=")[0] == "--elastic":
        raise UsageError(
            f"--elastic is not supported by `{parser.prog}`: an elastic job needs a launcher that replaces "
            "workers, and this platform starts them itself. Use `ctl launch --workers=MIN:MAX`, or "
            "--elastic=MIN:MAX of `ctl deploy kubernetes` or `ctl deploy slurm`"
        )
    if unknown:
        fix = f"see `{parser.prog} --help`; options of the program go after `--`"
        if separator == len(arguments):
            fix = f"write the program after `--`: {parser.example}"
        name = quoted(unknown[0].partition("=")[0])
        raise UsageError(f"{name} is not an option of `{parser.prog}`; {fix}")
    missing = [name for name in parser.required if getattr(parsed_options, name[2:]) is None]
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    if not program and parser.needs_program:
        raise UsageError(f"no program was given after `--`; expected e.g. {parser.example}")
    return CommandLine(parser.platform, parsed_options, tuple(program), tuple(options))


def _wide_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=100)


def _first_flag_index(program: Sequence[str]) -> int:
    return next((i for i, argument in enumerate(program) if argument.startswith("--")), len(program))
