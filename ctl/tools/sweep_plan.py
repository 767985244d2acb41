"""Runs of `ctl sweep`: the settings, the command and the directory of each run."""

import hashlib
import itertools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctl.errors import UsageError
from ctl.launch.process import check_program
from ctl.tools.random_search import NumberRange, ValueList, parse_range, random_combinations, unescape

SWEEP_EXAMPLE = "ctl sweep -- python -m models.mnist --learning_rate=1e-3,1e-4 --dropout=0,0.1"
_RANGE = re.compile(r":(log|uniform|linear|int|integer)$")  # not 10:20, which is also a value of --profile
_COMMA = re.compile(r"(?<!\\),")
_MAX_NAME_LENGTH = 150


@dataclass
class SweepRun:
    """One combination of settings.

    Attributes:
      name: Name of the run and of its directory.
      settings: Flag -> value as on the command line, for the flags with several values.
      command: The command with these values, and with the directory as its model_dir.
      directory: Directory of the run.
      exit_code: None until the run has ended.
      metrics: Metrics of the newest evaluation, or else of training, with "step".
      stopped_early: True if the run was ended because it was worse than the completed runs.
    """

    name: str
    settings: Mapping[str, str]
    command: Sequence[str]
    directory: Path
    exit_code: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    stopped_early: bool = False

    @property
    def is_complete(self) -> bool:
        """True if the run has succeeded, or was ended early."""
        return self.exit_code == 0 or self.stopped_early

    @property
    def flag_values(self) -> list[str]:
        """Settings as "name=value"."""
        return [f"{name}={value}" for name, value in self.settings.items()]

    @property
    def digest(self) -> str:
        """Hash of the command, because the command may contain secrets."""
        return hashlib.sha256("\0".join(self.command).encode()).hexdigest()


def plan_runs(
    command: Sequence[str], directory: str, random_runs: int | None = None, seed: int = 0
) -> tuple[Path, list[SweepRun]]:
    """Returns the directory of the sweep and its runs.

    Args:
      command: Command with its flags.
      directory: Directory of the sweep if the command has no --model_dir.
      random_runs: Number of random combinations. None: all combinations; the last flag changes fastest.
      seed: Seed of the random combinations.

    Raises:
      UsageError: If no flag has several values, or a range is invalid.
    """
    if random_runs is not None and random_runs < 1:
        raise UsageError(f"--random={random_runs} is invalid; expected a number of runs, 1 or more")
    check_program(command[0], f"expected a program on PATH or an executable file, e.g. {SWEEP_EXAMPLE}")
    fixed, swept, model_dir = _parse_command(command, is_random=random_runs is not None)
    if not swept:
        raise UsageError(
            f"no flag of the command has several values; expected e.g. {SWEEP_EXAMPLE}"
            + _separated_value_hint(command, is_random=random_runs is not None)
        )
    root = Path(model_dir or directory).expanduser()
    names = list(swept)
    runs = []
    if random_runs is None:
        choices = [domain.values for domain in swept.values() if isinstance(domain, ValueList)]
        combinations = [dict(zip(names, values, strict=True)) for values in itertools.product(*choices)]
    else:
        combinations = random_combinations(swept, random_runs, seed)
    for settings in combinations:
        name = _directory_name(settings)
        flags = [f"--{flag}={value}" for flag, value in settings.items()]
        runs.append(SweepRun(name, settings, [*fixed, *flags, f"--model_dir={root / name}"], root / name))
    return root, runs


def _separated_value_hint(command: Sequence[str], *, is_random: bool) -> str:
    """Returns a sentence about a flag with several values after a space, or an empty string."""
    for flag, value in itertools.pairwise(command):
        if not re.fullmatch(r"--[^=]+", flag) or value.startswith("--"):
            continue
        if len(_COMMA.split(value)) > 1 or (is_random and parse_range(f"{flag} {value}", value)):
            return f'. Write {flag}={value}, with "=" instead of a space'
    return ""


def _parse_command(
    command: Sequence[str], *, is_random: bool
) -> tuple[list[str], dict[str, ValueList | NumberRange], str]:
    """Returns the arguments without swept flags, the values of the swept flags, and --model_dir."""
    fixed: list[str] = []
    swept: dict[str, ValueList | NumberRange] = {}
    model_dir = ""
    remaining = iter(command)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if not (flag.startswith("--") and len(flag) > 2):
            fixed.append(argument)
            continue
        if flag == "--model_dir" and not equals:
            value, equals = next(remaining, ""), "="
        values = _COMMA.split(value) if equals else []
        if flag == "--model_dir":
            if len(values) > 1:
                raise UsageError(
                    f"{argument} has several directories; expected one, in which each run creates its own"
                )
            model_dir = value
        elif (domain := _domain_of(argument, flag, values, is_random=is_random)) is not None:
            if flag[2:] in swept:
                raise UsageError(f"{flag} was given twice; expected {flag}=a,b once")
            swept[flag[2:]] = domain
        else:
            text = argument.replace("\\,", ",")
            fixed.append(unescape(text) if is_random else text)
    return fixed, swept, model_dir


def _domain_of(
    argument: str, flag: str, values: Sequence[str], *, is_random: bool
) -> ValueList | NumberRange | None:
    """Returns the values of a flag that differs between runs, or None for other flags."""
    if len(values) == 1 and (is_random or _RANGE.search(values[0])):
        domain = parse_range(argument, values[0])
        if domain is not None and not is_random:
            raise UsageError(
                f"{argument} is a range, which needs --random=N before `--`; expected {flag}=a,b without it"
            )
        return domain
    if len(values) < 2:
        return None
    if "" in values or len(set(values)) < len(values):
        raise UsageError(
            f"{argument} has an empty or duplicate value; expected {flag}=a,b. Write a comma within a "
            "value as \\,"
        )
    texts = [value.replace("\\,", ",") for value in values]
    return ValueList([unescape(text) for text in texts] if is_random else texts)


def _directory_name(settings: Mapping[str, str]) -> str:
    readable_name = ",".join(f"{name}={value}" for name, value in settings.items())
    name = re.sub(r"[^\w.,=+-]", "_", readable_name)
    if name == readable_name and len(name) <= _MAX_NAME_LENGTH:
        return name
    return f"{name[:_MAX_NAME_LENGTH]}-{zlib.crc32(readable_name.encode()):08x}"
