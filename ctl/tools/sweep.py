"""The `ctl sweep -- command --name=a,b` command: one training run for each combination of settings.

With `--random=N`, the runs have N random combinations; see `random_search.py`.

Each run has its own directory, so a sweep can be restarted: it skips runs that have succeeded, and other
runs resume from their checkpoints. TensorBoard's HPARAMS tab compares the runs.
"""

import argparse
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctl.distribute.topology import Topology
from ctl.errors import EXIT_DONE, EXIT_FAILED, UsageError
from ctl.io.console import print_message
from ctl.launch.monitor import ForwardedSignals
from ctl.launch.process import Process, ProcessExit, start_process
from ctl.launch.process_tree import Guard
from ctl.metrics.protocol import RunEnd
from ctl.supervision.lease import LOCK_NAME, Lease
from ctl.tools import median_rule
from ctl.tools.median_rule import newest_metrics
from ctl.tools.sweep_plan import SWEEP_EXAMPLE, SweepRun, plan_runs
from ctl.tools.wrapping_command import WrappingParser

_STATE_FILE = "sweep.json"
_LOG_FILE = "console.log"
_WAIT_SECS = 0.1
_GRACE_SECS = 60.0  # for a run to save after a signal
_STOPPED = 128 + signal.SIGTERM
_EARLY_STOP_SECS = 1.0  # interval of the comparisons with completed runs


def main(argv: Sequence[str]) -> int:
    """Runs the sweep. Returns 0 if every run succeeded, 1 if a run failed, 2 for invalid arguments."""
    try:
        options, command = parser().read(argv)
        if options is None:
            return EXIT_DONE
        if options.jobs < 1:
            raise UsageError(
                f"--jobs={options.jobs} is invalid; expected the number of concurrent runs, 1 or more"
            )
        if options.early_stop is not None and options.early_stop < 1:
            raise UsageError(
                f"--early_stop={options.early_stop} is invalid; expected a number of completed runs, 1 "
                "or more"
            )
        directory, runs = plan_runs(command, options.dir, options.random, options.seed)
        completed_runs = _load_completed_runs(directory, runs)
        return _Sweep(directory, runs, options).run(completed_runs)
    except UsageError as e:
        print(f"ctl sweep: {e}", file=sys.stderr)
        return e.exit_code


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
        stopped_early = bool(previous.get("stopped_early"))
        is_complete = stopped_early or previous.get("exit_code") == 0
        if is_complete and is_same and (stopped_early or not _has_reached_time_limit(run.directory)):
            run.exit_code, run.metrics = previous.get("exit_code"), previous.get("metrics", {})
            run.stopped_early = stopped_early
            completed_runs.append(run)
    return completed_runs


class _Sweep:
    """Execution of the runs, at most `jobs` at a time."""

    def __init__(self, directory: Path, runs: Sequence[SweepRun], options: argparse.Namespace):
        self._directory, self._runs = directory, runs
        self._pending_runs: list[SweepRun] = []
        self._jobs, self._metric, self._maximizes = options.jobs, options.metric, options.max
        self._processes: dict[int, tuple[SweepRun, Process]] = {}  # by device slot, from 0 to jobs - 1
        self._min_completed: int | None = options.early_stop
        self._compare_at_secs = 0.0  # time of the next comparison with completed runs
        self._guard = Guard()

    def run(self, completed_runs: Sequence[SweepRun]) -> int:
        """Executes the remaining runs and returns the exit code."""
        self._pending_runs = [run for run in self._runs if run not in completed_runs]
        skipped_text = f", {len(completed_runs)} already completed" if completed_runs else ""
        print_message(
            f"{len(self._runs)} runs{skipped_text}, {self._jobs} concurrently, in {self._directory}",
            program="ctl sweep",
        )
        with ForwardedSignals() as signals:
            while (self._pending_runs or self._processes) and not signals.received:
                while self._pending_runs and len(self._processes) < self._jobs:
                    self._start(self._pending_runs.pop(0))
                time.sleep(_WAIT_SECS)
                self._poll()
                self._stop_early()
            if signals.received:
                self._stop_runs(signals)
        self._guard.close()
        print(self._format_table(), flush=True)
        if signals.received:
            print_message("run the same command again to resume this sweep", program="ctl sweep")
            return 128 + signals.received[0]
        return EXIT_DONE if all(run.is_complete for run in self._runs) else EXIT_FAILED

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
            status = f"failed: {process_exit}; see {run.directory / _LOG_FILE}"
            if run.exit_code is None:
                status = "was stopped after its last step; it is started again to complete"
            elif run.is_complete:
                status = f"{'stopped early' if run.stopped_early else 'ended'}, {metric_text}"
            print_message(f"{_format_settings(run)} {status}", program="ctl sweep")
            if not process_exit.returncode and run.metrics and self._metric not in run.metrics:
                self._stop_for_missing_metric(run)

    def _stop_early(self) -> None:
        """Ends the runs that are worse than the median of the completed runs, if this is requested."""
        if self._min_completed is None or time.monotonic() < self._compare_at_secs:
            return
        self._compare_at_secs = time.monotonic() + _EARLY_STOP_SECS
        completed = self._completed_curves()
        if len(completed) < self._min_completed:
            return
        for run, process in self._processes.values():
            if run.stopped_early or self._is_at_last_step(run, completed):
                continue
            curves = median_rule.curves(run.directory, self._metric)
            if median_rule.is_worse_than_median(curves, completed, maximizes=self._maximizes):
                run.stopped_early = True
                process.send(signal.SIGTERM)

    def _record_end(self, slot: int, process_exit: ProcessExit) -> None:
        """Stores the result of a run that has ended."""
        run, process = self._processes.pop(slot)
        self._guard.remove(process.pid)
        run.exit_code, run.metrics = process_exit.exit_code, newest_metrics(run.directory)
        run.stopped_early &= run.exit_code == _STOPPED  # it may have succeeded or failed in the meantime
        if run.stopped_early and self._is_at_last_step(run, self._completed_curves()):
            run.exit_code, run.stopped_early = None, False
            self._pending_runs.insert(0, run)
        self._save_state()

    def _completed_curves(self) -> list[dict[str, list[tuple[int, float]]]]:
        return [median_rule.curves(run.directory, self._metric) for run in self._runs if run.exit_code == 0]

    def _is_at_last_step(
        self, run: SweepRun, completed: Sequence[dict[str, list[tuple[int, float]]]]
    ) -> bool:
        """Returns True if a run has reached the last step of the completed runs."""
        last_step = median_rule.last_step(completed)
        step = median_rule.last_step([median_rule.curves(run.directory, self._metric)])
        return last_step is not None and step is not None and step >= last_step

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
                "stopped_early": run.stopped_early,
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
            code = "stopped early" if run.stopped_early else code
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


def parser() -> WrappingParser:
    """Returns the parser of the options before `--`."""
    arguments = WrappingParser(
        "ctl sweep",
        SWEEP_EXAMPLE,
        usage="ctl sweep [--dir=DIR] [--jobs=N] [--metric=NAME [--max]] [--early_stop] -- command "
        "--flag=a,b ...\n"
        "       ctl sweep --random=N [--seed=S] ... -- command --flag=low:high:log ...",
        description="Runs a command once for each combination of the flags that have several values, "
        "separated by\ncommas, and compares the results. The same command skips completed runs and resumes "
        "the other runs.\nWrite a comma within a value as \\,\n"
        "With --random, a flag may have a range: 1e-5:1e-2:log, 0:0.5, 16:256:int, 16:256:int:log. "
        "Write a\ncolon within a value as \\:",
        epilog=f"examples:\n  {SWEEP_EXAMPLE}\n"
        "  ctl sweep --jobs=2 --metric=accuracy --max -- python train.py --model_dir=/tmp/s --seed=0,1,2\n"
        "  ctl sweep --random=20 --early_stop -- python -m models.mnist --learning_rate=1e-5:1e-2:log",
    )
    arguments.add_argument(
        "--dir",
        default="sweep",
        help="directory of the runs if the command has no --model_dir (default: sweep)",
    )
    arguments.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="number of concurrent runs (default: 1)"
    )
    arguments.add_argument(
        "--metric",
        default="loss",
        metavar="NAME",
        help="metric that determines the best run (default: loss)",
    )
    arguments.add_argument(
        "--max", action="store_true", help="the best run has the largest value (default: the smallest)"
    )
    arguments.add_argument(
        "--random", type=int, metavar="N", help="number of runs with random combinations"
    )
    arguments.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of the random combinations (default: 0)"
    )
    arguments.add_argument(
        "--early_stop",
        type=int,
        nargs="?",
        const=1,
        metavar="N",
        help="end runs that are worse than the median of N or more completed runs (default: 1)",
    )
    return arguments
