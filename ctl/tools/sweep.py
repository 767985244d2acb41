"""The `ctl sweep -- command --name=a,b` command: one training run for each combination of settings.

Each run has its own directory, so a sweep can be restarted: it skips runs that have succeeded, and other
runs resume from their checkpoints. TensorBoard's HPARAMS tab compares the runs.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctl.distribute.topology import Topology
from ctl.errors import EXIT_DONE, EXIT_FAILED, UsageError
from ctl.io.console import print_message
from ctl.launch.monitor import ForwardedSignals
from ctl.launch.process import Process, check_program, start_process
from ctl.launch.process_tree import Guard
from ctl.tools.wrapping_command import WrappingParser

SWEEP_EXAMPLE = "ctl sweep -- python -m models.mnist --learning_rate=1e-3,1e-4 --dropout=0,0.1"
_STATE = "sweep.json"
_LOG = "console.log"
_COMMA = re.compile(r"(?<!\\),")
_WAIT_SECS = 0.1
_GRACE_SECS = 60.0  # for a run to save after a signal
_MOST_NAME = 150


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
    """

    name: str
    settings: Mapping[str, str]
    command: Sequence[str]
    directory: Path
    exit_code: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Hash of the command, because the command may contain secrets."""
        return hashlib.sha256("\0".join(self.command).encode()).hexdigest()


def main(argv: Sequence[str]) -> int:
    """Runs the sweep. Returns 0 if every run succeeded, 1 if a run failed, 2 for invalid arguments."""
    try:
        parsed, command = _parser().read(argv)
        if parsed is None:
            return EXIT_DONE
        if parsed.jobs < 1:
            raise UsageError(f"--jobs is {parsed.jobs}; expected a number of runs at a time, from 1")
        directory, runs = planned(command, parsed.dir)
        done = _ended_before(directory, runs)
        return _Sweep(directory, runs, parsed).run(done)
    except UsageError as e:
        print(f"ctl sweep: {e}", file=sys.stderr)
        return e.exit_code


def planned(command: Sequence[str], directory: str) -> tuple[Path, list[SweepRun]]:
    """Returns the directory of the sweep and its runs. The last flag changes fastest. Raises UsageError."""
    check_program(command[0], f"expected one on PATH, or an executable file; e.g. {SWEEP_EXAMPLE}")
    fixed, swept, own = _parsed(command)
    if not swept:
        raise UsageError(f"no flag of the command has several values; expected e.g. {SWEEP_EXAMPLE}")
    root = Path(own or directory).expanduser()
    names = list(swept)
    runs = []
    for values in itertools.product(*swept.values()):
        settings = dict(zip(names, values, strict=True))
        name = _directory_name(settings)
        flags = [f"--{flag}={value}" for flag, value in settings.items()]
        runs.append(SweepRun(name, settings, [*fixed, *flags, f"--model_dir={root / name}"], root / name))
    return root, runs


def _parsed(command: Sequence[str]) -> tuple[list[str], dict[str, list[str]], str]:
    """Returns the arguments without swept flags, the values of the swept flags, and --model_dir."""
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    own = ""
    words = iter(command)
    for word in words:
        flag, equals, text = word.partition("=")
        if not (flag.startswith("--") and len(flag) > 2):
            fixed.append(word)
            continue
        if flag == "--model_dir" and not equals:
            text, equals = next(words, ""), "="
        values = _COMMA.split(text) if equals else []
        if flag == "--model_dir":
            if len(values) > 1:
                raise UsageError(f"{word}: each run has a directory in --model_dir; expected one")
            own = text
        elif len(values) > 1:
            _check(word, flag, values, swept)
            swept[flag[2:]] = [value.replace("\\,", ",") for value in values]
        else:
            fixed.append(word.replace("\\,", ","))
    return fixed, swept, own


def _check(word: str, flag: str, values: Sequence[str], swept: Mapping[str, Any]) -> None:
    if flag[2:] in swept:
        raise UsageError(f"{flag} comes twice; expected {flag}=a,b once")
    if "" in values or len(set(values)) < len(values):
        raise UsageError(
            f"{word}: a value is empty or comes twice; expected {flag}=a,b. A comma that is part of a "
            "value is written \\,"
        )


def _directory_name(settings: Mapping[str, str]) -> str:
    plain = ",".join(f"{name}={value}" for name, value in settings.items())
    name = re.sub(r"[^\w.,=+-]", "_", plain)
    if name == plain and len(name) <= _MOST_NAME:
        return name
    return f"{name[:_MOST_NAME]}-{zlib.crc32(plain.encode()):08x}"


def _ended_before(directory: Path, runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Returns the runs that an earlier sweep of the same commands has completed. Raises UsageError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        known = json.loads((directory / _STATE).read_text())["runs"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError) as e:
        raise UsageError(
            f"{directory / _STATE} cannot be read ({e}); expected that of an earlier sweep. Remove it, or "
            "give another --dir."
        ) from None
    found = []
    for run in runs:
        before = known.get(run.name, {})
        if before.get("exit_code") == 0 and before.get("command_digest") == run.digest:
            run.exit_code, run.metrics = 0, before.get("metrics", {})
            found.append(run)
    return found


class _Sweep:
    """Execution of the runs, at most `jobs` at a time."""

    def __init__(self, directory: Path, runs: Sequence[SweepRun], options: argparse.Namespace):
        self._directory, self._runs = directory, runs
        self._jobs, self._metric, self._largest = options.jobs, options.metric, options.max
        self._processes: dict[int, tuple[SweepRun, Process]] = {}  # by device slot, from 0 to jobs - 1
        self._guard = Guard()

    def run(self, done: Sequence[SweepRun]) -> int:
        """Executes the remaining runs and returns the exit code."""
        left = [run for run in self._runs if run not in done]
        said = f", {len(done)} of them done before" if done else ""
        print_message(
            f"{len(self._runs)} runs{said}, {self._jobs} at a time, in {self._directory}",
            program="ctl sweep",
        )
        with ForwardedSignals() as signals:
            while (left or self._processes) and not signals.received:
                while left and len(self._processes) < self._jobs:
                    self._start(left.pop(0))
                time.sleep(_WAIT_SECS)
                self._poll()
            if signals.received:
                self._end(signals)
        self._guard.close()
        print(self._table(), flush=True)
        if signals.received:
            print_message("the same command goes on where this one ended", program="ctl sweep")
            return 128 + signals.received[0]
        return EXIT_DONE if all(run.exit_code == 0 for run in self._runs) else EXIT_FAILED

    def _start(self, run: SweepRun) -> None:
        place = min(set(range(self._jobs)) - set(self._processes))
        log = run.directory / _LOG
        try:
            run.directory.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                process = start_process(
                    run.command,
                    Topology(),
                    output=file.fileno(),
                    errors=file.fileno(),
                    environ=_device(place),
                )
        except OSError as e:
            raise UsageError(f"{run.command[0]!r} cannot be started, with the log {log}: {e}") from e
        self._guard.add(process.pid)
        self._processes[place] = run, process
        number = self._runs.index(run) + 1
        print_message(
            f"{number}/{len(self._runs)} {_said(run)} begins; output in {log}", program="ctl sweep"
        )

    def _poll(self) -> None:
        for place, (run, process) in list(self._processes.items()):
            end = process.poll()
            if end is None:
                continue
            self._guard.remove(process.pid)
            del self._processes[place]
            run.exit_code, run.metrics = end.exit_code, newest_metrics(run.directory)
            self._save()
            value = run.metrics.get(self._metric)
            what = f"{self._metric} {value:.4g}" if isinstance(value, float) else "no " + self._metric
            how = f"ended, {what}" if not end.returncode else f"failed: {end}; see {run.directory / _LOG}"
            print_message(f"{_said(run)} {how}", program="ctl sweep")
            if not end.returncode and run.metrics and self._metric not in run.metrics:
                self._refuse_metric(run)

    def _refuse_metric(self, run: SweepRun) -> None:
        """Ends all runs and raises UsageError: no run of the sweep will have the metric."""
        for _, process in self._processes.values():
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECS
        while self._processes and time.monotonic() < deadline:
            time.sleep(_WAIT_SECS)
            for place, (_, process) in list(self._processes.items()):
                if process.poll() is not None:
                    del self._processes[place]
        for _, process in self._processes.values():
            process.kill()
        names = ", ".join(name for name in run.metrics if name != "step")
        raise UsageError(
            f"--metric is {self._metric!r}, and the run {run.name} has only {names}. The same command with "
            "another --metric goes on from here."
        )

    def _end(self, signals: ForwardedSignals) -> None:
        """Forwards a signal and waits while the runs save."""
        until = time.monotonic() + _GRACE_SECS
        for _, process in self._processes.values():
            process.send(signal.SIGTERM)
        while self._processes and time.monotonic() < until and not signals.is_repeated():
            time.sleep(_WAIT_SECS)
            self._poll()
        for _, process in self._processes.values():
            process.kill()

    def _save(self) -> None:
        runs = {
            run.name: {
                "settings": dict(run.settings),
                "command_digest": run.digest,
                "exit_code": run.exit_code,
                "metrics": run.metrics,
            }
            for run in self._runs
        }
        new = self._directory / f"{_STATE}.new"
        new.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        os.replace(new, self._directory / _STATE)

    def _table(self) -> str:
        """Returns the table of runs, the best first, and the command that displays them."""

        def order(run: SweepRun) -> tuple[bool, float]:
            value = run.metrics.get(self._metric)
            if not isinstance(value, (int, float)) or math.isnan(value):
                return True, 0.0
            return False, -value if self._largest else value

        names = list(self._runs[0].settings)
        metrics = list(dict.fromkeys(name for run in self._runs for name in run.metrics))
        metrics.sort(key=lambda name: (name != self._metric, name == "step"))
        rows = [[*names, *metrics, "exit code"]]
        for run in sorted(self._runs, key=order):
            code = "" if run.exit_code is None else str(run.exit_code)
            values = [_number(run.metrics.get(name)) for name in metrics]
            rows.append([*run.settings.values(), *values, code])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)) for row in rows
        ]
        return "\n".join([*lines, "", f"tensorboard --logdir {shlex.quote(str(self._directory))}"])


def newest_metrics(directory: Path) -> dict[str, Any]:
    """Returns the metrics of the newest evaluation in metrics.jsonl, or else of training, or none."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(OSError):
        for line in (directory / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                found[row.pop("run", "train")] = row
    chosen = found.get("eval") or found.get("train") or {}
    return {name: value for name, value in chosen.items() if name != "time"}


def _device(place: int) -> dict[str, str]:
    """Returns the GPU of a slot: concurrent runs share the GPUs of CUDA_VISIBLE_DEVICES, one each."""
    devices = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    return {"CUDA_VISIBLE_DEVICES": devices[place % len(devices)]} if len(devices) > 1 else {}


def _said(run: SweepRun) -> str:
    return " ".join(f"{name}={value}" for name, value in run.settings.items())


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _parser() -> WrappingParser:
    parser = WrappingParser(
        "ctl sweep",
        SWEEP_EXAMPLE,
        usage="ctl sweep [--dir=DIR] [--jobs=N] [--metric=NAME [--max]] -- command --flag=a,b ...",
        description="Runs a command once for each combination of the flags that have several values, with "
        "a comma\nbetween them, and compares what came out. Started again, it leaves out what has ended "
        "well\nand resumes the rest. A comma that is part of a value is written \\,",
        epilog=f"examples:\n  {SWEEP_EXAMPLE}\n"
        "  ctl sweep --jobs=2 --metric=accuracy --max -- python train.py --model_dir=/tmp/s --seed=0,1,2",
    )
    parser.add_argument("--dir", default="sweep", help="where the runs go, without --model_dir (sweep)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (1)")
    parser.add_argument("--metric", default="loss", metavar="NAME", help="what tells the best (loss)")
    parser.add_argument("--max", action="store_true", help="the largest is the best")
    return parser
