"""Where a manifest goes: to stdout, or to a file that is not overwritten unasked; what to do next."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ctl.errors import UsageError
from ctl.io.console import quoted


@dataclass(frozen=True)
class Advice:
    """What a person should know beside the manifest.

    Attributes:
      fill_in: what the manifest names and somebody has to put there or create.
      warnings: what looks wrong and may still be meant.
      commands: what to type next; `{file}` is where the manifest is.
    """

    fill_in: Sequence[str] = ()
    warnings: Sequence[str] = ()
    commands: Sequence[str] = ()
    notes: Sequence[str] = field(default=())


def deliver(text: str, path: str | None, advice: Advice, *, force: bool, default: str) -> None:
    """Writes the manifest and tells the advice; that goes to stderr when the manifest goes to stdout.

    Args:
      text: the manifest.
      path: the file; None for stdout.
      advice: told when all is written.
      force: replace a file that has other content.
      default: how the commands call the file when it went to stdout, such as "job.yaml".

    Raises UsageError for a file that has other content or cannot be written; nothing is written then.
    """
    if path is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write({Path(path): text}, force=force)
    tell(advice, path or default, to_stdout=path is not None, written=[path] if path else [])


def write(files: dict[Path, str], *, force: bool) -> None:
    """Writes all files or none: UsageError first for one that has other content, unless `force`."""
    for path, text in files.items():
        try:
            old = path.read_text(encoding="utf-8") if path.exists() else text
        except (OSError, UnicodeDecodeError):
            old = ""
        if old != text and not force:
            raise UsageError(
                f"{quoted(str(path))} exists with other content; expected a new file. Give another "
                "--output, or --force to replace it"
            )
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as e:
            raise UsageError(
                f"{quoted(str(path))} cannot be written ({e.strerror}); give a path that can be written "
                "with --output"
            ) from None


def tell(advice: Advice, file: str, *, to_stdout: bool, written: Sequence[str] = ()) -> None:
    """Prints the advice for a person."""
    lines = [f"wrote {path}" for path in written]
    lines += [f"warning: {text}" for text in advice.warnings]
    lines += [f"note: {text}" for text in advice.notes]
    if advice.fill_in:
        lines += ["fill in or create first:", *(f"  {what}" for what in advice.fill_in)]
    if advice.commands:
        lines += ["next:", *(f"  {command.replace('{file}', file)}" for command in advice.commands)]
    if lines:
        print("\n".join(lines), file=sys.stdout if to_stdout else sys.stderr)
