"""Parser for `ctl NAME [options] -- command [its options]`, used by `ctl profile` and `ctl sweep`."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from ctl.errors import UsageError


class WrappingParser(argparse.ArgumentParser):
    """Parser of the options before `--`. Raises UsageError instead of ending the process.

    Args:
      name: Name, such as "ctl sweep".
      example: A valid command line, part of each error message.
      parser_arguments: Arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, name: str, example: str, **parser_arguments: Any):
        super().__init__(
            prog=name,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
            **parser_arguments,
        )
        self.example = example
        self.add_argument("-h", "--help", action="store_true", help="show this text")

    def read(self, argv: Sequence[str]) -> tuple[argparse.Namespace | None, list[str]]:
        """Returns the options and the arguments after `--`. --help is printed and returns (None, []).

        Raises UsageError for an unknown option or a missing command.
        """
        arguments = list(argv)
        separator = arguments.index("--") if "--" in arguments else len(arguments)
        parsed, command = self.parse_args(arguments[:separator]), arguments[separator + 1 :]
        if parsed.help:
            print(self.format_help(), end="")
            return None, []
        if not command:
            raise UsageError(f"no command was given after `--`; expected e.g. {self.example}")
        return parsed, command

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with the message and the example."""
        raise UsageError(f"{message}; write the command after `--`: {self.example}")
