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
from ctl.launch.process import Process, ProcessExit, check_program, start_process
from ctl.launch.process_tree import Guard
from ctl.metrics.protocol import RunEnd
from ctl.supervision.lease import LOCK_NAME, Lease
from ctl.tools.wrapping_command import WrappingParser

SWEEP_EXAMPLE = "ctl sweep -- python -m models.mnist --learning_rate=1e-3,1e-4 --dropout=0,0.1"
_STATE_FILE = "sweep.json"
_LOG_FILE = "console.log"
_COMMA = re.compile(r"(?<!\\),")
_WAIT_SECS = 0.1
_GRACE_SECS = 60.0  # for a run to save after a signal
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
    """

    name: str
    settings: Mapping[str, str]
    command: Sequence[str]
    directory: Path
    exit_code: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def flag_values(self) -> list[str]:
        """Settings as "name=value"."""
        return [f"{name}={value}" for name, value in self.settings.items()]

    @property
    def digest(self) -> str:
        """Hash of the command, because the command may contain secrets."""
        return hashlib.sha256("\0".join(self.command).encode()).hexdigest()


def main(argv: Sequence[str]) -> int:
    """Runs the sweep. Returns 0 if every run succeeded, 1 if a run failed, 2 for invalid arguments."""
    try:
        options, command = _parser().read(argv)
        if options is None:
            return EXIT_DONE
        if options.jobs < 1:
            raise UsageError(
                f"--jobs={options.jobs} is invalid; expected the number of concurrent runs, 1 or more"
            )
        directory, runs = plan_runs(command, options.dir)
        completed_runs = _load_completed_runs(directory, runs)
        return _Sweep(directory, runs, options).run(completed_runs)
    except UsageError as e:
        print(f"ctl sweep: {e}", file=sys.stderr)
        return e.exit_code


def plan_runs(command: Sequence[str], directory: str) -> tuple[Path, list[SweepRun]]:
    """Returns the directory of the sweep and its runs.

    The last flag changes fastest. Raises UsageError if no flag has several values.
    """
    check_program(command[0], f"expected a program on PATH or an executable file, e.g. {SWEEP_EXAMPLE}")
    fixed, swept, model_dir = _parse_command(command)
    if not swept:
        raise UsageError(f"no flag of the command has several values; expected e.g. {SWEEP_EXAMPLE}")
    root = Path(model_dir or directory).expanduser()
    names = list(swept)
    runs = []
    for values in itertools.product(*swept.values()):
        settings = dict(zip(names, values, strict=True))
        name = _directory_name(settings)
        flags = [f"--{flag}={value}" for flag, value in settings.items()]
        runs.append(SweepRun(name, settings, [*fixed, *flags, f"--model_dir={root / name}"], root / name))
    return root, runs


def _parse_command(command: Sequence[str]) -> tuple[list[str], dict[str, list[str]], str]:
    """Returns the arguments without swept flags, the values of the swept flags, and --model_dir."""
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
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
        elif len(values) > 1:
            _check_values(argument, flag, values, swept)
            swept[flag[2:]] = [value.replace("\\,", ",") for value in values]
        else:
            fixed.append(argument.replace("\\,", ","))
    return fixed, swept, model_dir


def _check_values(argument: str, flag: str, values: Sequence[str], swept: Mapping[str, Any]) -> None:
    if flag[2:] in swept:
        raise UsageError(f"{flag} was given twice; expected {flag}=a,b once")
    if "" in values or len(set(values)) < len(values):
        raise UsageError(
            f"{argument} has an empty or duplicate value; expected {flag}=a,b. Write a comma within a "
            "value as \\,"
        )


def _directory_name(settings: Mapping[str, str]) -> str:
    readable_name = ",".join(f"{name}={value}" for name, value in settings.items())
    name = re.sub(r"[^\w.,=+-]", "_", readable_name)
    if name == readable_name and len(name) <= _MAX_NAME_LENGTH:
        return name
    return f"{name[:_MAX_NAME_LENGTH]}-{zlib.crc32(readable_name.encode()):08x}"


def _load_completed_runs(directory: Path, runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Returns the runs that an earlier sweep of the same commands has completed. Raises UsageError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        previous_runs = json.loads((directory / _STATE_FILE).read_text())["runs"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError) as e:
        raise UsageError(
            f"{directory / _STATE_FILE} cannot be read ({e}); expected the state of an earlier sweep. "
            "Remove the file, or specify another --dir."
        ) from None
    completed_runs = []
    for run in runs:
        previous = previous_runs.get(run.name, {})
        is_same = previous.get("command_digest") == run.digest
        if previous.get("exit_code") == 0 and is_same and not _has_reached_time_limit(run.directory):
            run.exit_code, run.metrics = 0, previous.get("metrics", {})
            completed_runs.append(run)
    return completed_runs


class _Sweep:
    """Execution of the runs, at most `jobs` at a time."""

    def __init__(self, directory: Path, runs: Sequence[SweepRun], options: argparse.Namespace):
        self._directory, self._runs = directory, runs
        self._jobs, self._metric, self._maximizes = options.jobs, options.metric, options.max
        self._processes: dict[int, tuple[SweepRun, Process]] = {}  # by device slot, from 0 to jobs - 1
        self._guard = Guard()

    def run(self, completed_runs: Sequence[SweepRun]) -> int:
        """Executes the remaining runs and returns the exit code."""
        pending_runs = [run for run in self._runs if run not in completed_runs]
        skipped_text = f", {len(completed_runs)} already completed" if completed_runs else ""
        print_message(
            f"{len(self._runs)} runs{skipped_text}, {self._jobs} concurrently, in {self._directory}",
            program="ctl sweep",
        )
        with ForwardedSignals() as signals:
            while (pending_runs or self._processes) and not signals.received:
                while pending_runs and len(self._processes) < self._jobs:
                    self._start(pending_runs.pop(0))
                time.sleep(_WAIT_SECS)
                self._poll()
            if signals.received:
                self._stop_runs(signals)
        self._guard.close()
        print(self._format_table(), flush=True)
        if signals.received:
            print_message("run the same command again to resume this sweep", program="ctl sweep")
            return 128 + signals.received[0]
        return EXIT_DONE if all(run.exit_code == 0 for run in self._runs) else EXIT_FAILED

    def _start(self, run: SweepRun) -> None:
        slot = min(set(range(self._jobs)) - set(self._processes))
        log = run.directory / _LOG_FILE
        try:
            run.directory.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                process = start_process(
                    run.command,
                    Topology(),
                    output=file.fileno(),
                    errors=file.fileno(),
                    environ={"CTL_SWEPT_SETTINGS": ",".join(run.flag_values), **_gpu_environment(slot)},
                )
        except OSError as e:
            raise UsageError(f"{run.command[0]!r} cannot be started with the log {log} ({e})") from e
        self._guard.add(process.pid)
        self._processes[slot] = run, process
        number = self._runs.index(run) + 1
        print_message(
            f"{number}/{len(self._runs)} {_format_settings(run)} started; output in {log}",
            program="ctl sweep",
        )

    def _poll(self) -> None:
        for slot, (run, process) in list(self._processes.items()):
            process_exit = process.poll()
            if process_exit is None:
                continue
            self._record_end(slot, process_exit)
            value = run.metrics.get(self._metric)
            metric_text = (
                f"{self._metric} {value:.4g}" if isinstance(value, float) else "no " + self._metric
            )
            status = (
                f"ended, {metric_text}"
                if not process_exit.returncode
                else f"failed: {process_exit}; see {run.directory / _LOG_FILE}"
            )
            print_message(f"{_format_settings(run)} {status}", program="ctl sweep")
            if not process_exit.returncode and run.metrics and self._metric not in run.metrics:
                self._stop_for_missing_metric(run)

    def _record_end(self, slot: int, process_exit: ProcessExit) -> None:
        """Stores the result of a run that has ended."""
        run, process = self._processes.pop(slot)
        self._guard.remove(process.pid)
        run.exit_code, run.metrics = process_exit.exit_code, newest_metrics(run.directory)
        self._save_state()

    def _stop_for_missing_metric(self, run: SweepRun) -> None:
        """Ends all runs and raises UsageError, because no run of the sweep will have the metric."""
        for _, process in self._processes.values():
            process.send(signal.SIGTERM)
        deadline_secs = time.monotonic() + _GRACE_SECS
        while self._processes and time.monotonic() < deadline_secs:
            time.sleep(_WAIT_SECS)
            for slot, (_, process) in list(self._processes.items()):
                if (process_exit := process.poll()) is not None:
                    self._record_end(slot, process_exit)
        for _, process in self._processes.values():
            process.kill()
        self._guard.close()
        names = ", ".join(name for name in run.metrics if name != "step")
        raise UsageError(
            f"--metric={self._metric} is not reported by the run {run.name}; expected one of {names}. Run "
            "the command again with another --metric to resume the sweep"
        )

    def _stop_runs(self, signals: ForwardedSignals) -> None:
        """Forwards a signal and waits while the runs save."""
        deadline_secs = time.monotonic() + _GRACE_SECS
        for _, process in self._processes.values():
            process.send(signal.SIGTERM)
        while self._processes and time.monotonic() < deadline_secs and not signals.is_repeated():
            time.sleep(_WAIT_SECS)
            self._poll()
        for _, process in self._processes.values():
            process.kill()

    def _save_state(self) -> None:
        runs = {
            run.name: {
                "settings": dict(run.settings),
                "command_digest": run.digest,
                "exit_code": run.exit_code,
                "metrics": run.metrics,
            }
            for run in self._runs
        }
        temporary_path = self._directory / f"{_STATE_FILE}.new"
        temporary_path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        os.replace(temporary_path, self._directory / _STATE_FILE)

    def _format_table(self) -> str:
        """Returns the table of runs, the best first, and the command that displays them."""

        def sort_key(run: SweepRun) -> tuple[bool, float]:
            value = run.metrics.get(self._metric)
            if not isinstance(value, (int, float)) or math.isnan(value):
                return True, 0.0
            return False, -value if self._maximizes else value

        names = list(self._runs[0].settings)
        metrics = list(dict.fromkeys(name for run in self._runs for name in run.metrics))
        metrics.sort(key=lambda name: (name != self._metric, name == "step"))
        rows = [[*names, *metrics, "exit code"]]
        for run in sorted(self._runs, key=sort_key):
            code = "" if run.exit_code is None else str(run.exit_code)
            values = [_format_value(run.metrics.get(name)) for name in metrics]
            rows.append([*run.settings.values(), *values, code])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        return "\n".join([*lines, "", f"tensorboard --logdir {shlex.quote(str(self._directory))}"])


def _has_reached_time_limit(directory: Path) -> bool:
    """Returns True if the newest training in a directory ended at --max_secs and must continue."""
    holder = Lease(directory / LOCK_NAME).read()
    return holder is not None and holder.reason == RunEnd.TIME_LIMIT.value


def newest_metrics(directory: Path) -> dict[str, Any]:
    """Returns the metrics of the newest evaluation in metrics.jsonl, else of training, else {}."""
    row_by_run: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(OSError):
        for line in (directory / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                row_by_run[row.pop("run", "train")] = row
    chosen = row_by_run.get("eval") or row_by_run.get("train") or {}
    return {name: value for name, value in chosen.items() if name not in ("time", "epoch")}


def _gpu_environment(slot: int) -> dict[str, str]:
    """Returns the GPU of a slot: concurrent runs share the GPUs of CUDA_VISIBLE_DEVICES, one each."""
    devices = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    return {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} if len(devices) > 1 else {}


def _format_settings(run: SweepRun) -> str:
    return " ".join(run.flag_values)


def _format_value(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _parser() -> WrappingParser:
    parser = WrappingParser(
        "ctl sweep",
        SWEEP_EXAMPLE,
        usage="ctl sweep [--dir=DIR] [--jobs=N] [--metric=NAME [--max]] -- command --flag=a,b ...",
        description="Runs a command once for each combination of the flags that have several values, "
        "separated by\ncommas, and compares the results. The same command skips completed runs and resumes "
        "the other runs.\nWrite a comma within a value as \\,",
        epilog=f"examples:\n  {SWEEP_EXAMPLE}\n"
        "  ctl sweep --jobs=2 --metric=accuracy --max -- python train.py --model_dir=/tmp/s --seed=0,1,2",
    )
    parser.add_argument(
        "--dir",
        default="sweep",
        help="directory of the runs if the command has no --model_dir (default: sweep)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="number of concurrent runs (default: 1)"
    )
    parser.add_argument(
        "--metric",
        default="loss",
        metavar="NAME",
        help="metric that determines the best run (default: loss)",
    )
    parser.add_argument(
        "--max", action="store_true", help="the best run has the largest value (default: the smallest)"
    )
    return parser
