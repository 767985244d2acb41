"""Output of generated manifests."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ctl.deploy.args import CommandLine
from ctl.errors import UsageError
from ctl.io.console import quoted


@dataclass(frozen=True)
class Advice:
    """Messages for the user that accompany a manifest.

    Attributes:
      fill_in: Placeholders and external objects that the user has to supply.
      warnings: Probable mistakes.
      notes: Further information.
      commands: Next shell commands. `{file}` is the path of the manifest.
    """

    fill_in: Sequence[str] = ()
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    commands: Sequence[str] = ()


def deliver_manifest(line: CommandLine, text: str, advice: Advice, default: str) -> None:
    """Writes a manifest to --output or stdout, then the advice: to stderr if the manifest is on stdout.

    `default` is the file name in the commands if the manifest was written to stdout, such as "job.yaml".
    """
    path = line.options.output
    if path is None:
        print(text, end="", flush=True)
    else:
        write_files({Path(path): text}, force=line.options.force)
    print_advice(advice, path or default, written=[path] if path else [], to_stdout=path is not None)


def write_files(files: dict[Path, str], *, force: bool) -> None:
    """Writes all files or none. Without `force`, raises UsageError if one exists with other content."""
    for path, text in files.items():
        try:
            existing_text = path.read_text(encoding="utf-8") if path.exists() else text
        except (OSError, UnicodeDecodeError):
            existing_text = ""
        if existing_text != text and not force:
            raise UsageError(
                f"{quoted(str(path))} exists with other content; expected a new file. Specify another "
                "--output, or --force to replace the file"
            )
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as e:
            problem = f"{quoted(str(path))} cannot be written ({e.strerror})"
            raise UsageError(f"{problem}; specify a writable path with --output") from None


def print_advice(advice: Advice, file: str, *, written: Sequence[str], to_stdout: bool) -> None:
    """Prints the names of the written files and the advice."""
    lines = [f"wrote {path}" for path in written]
    lines += [f"warning: {text}" for text in advice.warnings]
    lines += [f"note: {text}" for text in advice.notes]
    if advice.fill_in:
        lines += ["fill in or create first:", *(f"  {item}" for item in advice.fill_in)]
    if advice.commands:
        lines += ["next:", *(f"  {command.replace('{file}', file)}" for command in advice.commands)]
    if lines:
        print("\n".join(lines), file=sys.stdout if to_stdout else sys.stderr)
