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
      texts: Arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, name: str, example: str, **texts: Any):
        super().__init__(
            prog=name,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
            **texts,
        )
        self.example = example
        self.add_argument("-h", "--help", action="store_true", help="show this text")

    def read(self, argv: Sequence[str]) -> tuple[argparse.Namespace | None, list[str]]:
        """Returns the options and the arguments after `--`. --help is printed and returns (None, []).

        Raises UsageError for an unknown option or a missing command.
        """
        words = list(argv)
        split = words.index("--") if "--" in words else len(words)
        parsed, command = self.parse_args(words[:split]), words[split + 1 :]
        if parsed.help:
            print(self.format_help(), end="")
            return None, []
        if not command:
            raise UsageError(f"no command came after `--`; expected e.g. {self.example}")
        return parsed, command

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; the command goes after `--`: {self.example}")
