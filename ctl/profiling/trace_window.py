"""TensorFlow trace of some steps (`--profile=100:110`), for TensorBoard's profile plugin.

logs/train/plugins/profile/steps_100-110/worker_0.xplane.pb     # a file for each worker

Each traced step is a separate graph call, so that the plugin can distinguish steps.
"""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from ctl.distribute.world import World
from ctl.errors import UsageError
from ctl.io import paths
from ctl.profiling.loop_observer import LoopObserver, ObserverInputs
from ctl.setting_values import parse_step_range
from google.protobuf.message import DecodeError

_log = logging.getLogger("ctl")


def check_trace(steps: str, log_dir: str, world: World) -> None:
    """Raises UsageError if a trace is requested without a directory, or with parameter servers.

    Args:
      steps: Range of steps, or an empty string.
      log_dir: Directory of TensorBoard's event files, or an empty string.
      world: Processes of the job.
    """
    if not steps:
        return
    if not log_dir:
        raise UsageError(
            f"profile is {steps!r}, but there is no model_dir for the trace. Give --model_dir as well, or "
            "leave --profile out."
        )
    if world.is_asynchronous:
        raise UsageError(
            f"profile is {steps!r}, and workers of parameter servers are asynchronous: no step is the same "
            "on all of them. Leave --profile out, or use another strategy."
        )


class TraceWindow(LoopObserver):
    """Trace of the steps in a range. A run that resumes within the range traces the remaining steps.

    Args:
      steps: Range "first:last" of completed steps.
      directory: Directory of the trace, the same for all workers.
      name: Name of the file of this worker.
    """

    def __init__(self, steps: str, directory: str, name: str):
        self._first, self._last = parse_step_range(steps)
        self.path = paths.path(directory) / f"steps_{self._first}-{self._last}" / f"{name}.xplane.pb"
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._is_complete = False

    def next_mark(self, step: int) -> int | None:
        """Returns the next step at which the trace starts or ends."""
        if step < self._first:
            return self._first
        return step + 1 if self._covers(step) else None

    def _covers(self, step: int) -> bool:
        return self._first <= step < self._last and not self._is_complete

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[bool]:
        """Traces the graph call after `step`, if it is among the steps. Yields True then."""
        if not self._covers(step):
            yield False
            return
        self._start()
        event: Any = tf.profiler.experimental.Trace("train", step_num=step + 1, _r=1)
        with event:
            yield True
        if step + 1 == self._last:
            self.close()

    def _start(self) -> None:
        if self._temporary is not None:
            return
        self._temporary = tempfile.TemporaryDirectory(prefix="ctl-profile-", ignore_cleanup_errors=True)
        try:
            tf.profiler.experimental.start(self._temporary.name)
        except tf.errors.OpError as e:
            self._temporary.cleanup()
            self._is_complete = True
            _log.warning("--profile: the trace cannot be started (%s); training continues.", e.message)

    def close(self) -> None:
        """Writes the trace, if it has started."""
        if self._temporary is None or self._is_complete:
            return
        self._is_complete = True
        with self._temporary as directory:
            try:
                tf.profiler.experimental.stop()
                for file in Path(directory).rglob("*.xplane.pb"):
                    _hide_loops(file)
                    paths.copy_tree(file, self.path)
            except (OSError, tf.errors.OpError) as e:
                _log.warning("%s cannot be written (%s); training continues.", self.path, e)


def new_trace(steps: str, log_dir: str, worker_index: int) -> TraceWindow | None:
    """Returns a trace of `steps`, such as "100:110", or None without steps or without a directory."""
    if not (steps and log_dir):
        return None
    return TraceWindow(steps, f"{log_dir}/train/plugins/profile", f"worker_{worker_index}")


def create_trace(inputs: ObserverInputs) -> TraceWindow | None:
    """Creates the trace for `--profile`, or returns None without this flag."""
    return new_trace(inputs.config.profile, inputs.log_dir, inputs.world.topology.worker_index)


def _hide_loops(path: Path) -> None:
    """Removes the iteration numbers of `tf.while_loop`, in which steps run, from a trace.

    If there are any, the plugin takes these iterations for the steps and ignores the real ones.
    """
    try:
        from tensorflow.tsl.profiler.protobuf import xplane_pb2

        trace = xplane_pb2.XSpace()
        trace.ParseFromString(path.read_bytes())
    except (ImportError, DecodeError):  # no part of TensorFlow's API; larger than 2 GB
        return
    for plane in trace.planes:
        hidden = {i for i, stat in plane.stat_metadata.items() if stat.name == "iter_num"}
        for event in (event for line in plane.lines for event in line.events):
            visible = [stat for stat in event.stats if stat.metadata_id not in hidden]
            if len(visible) < len(event.stats):
                del event.stats[:]
                event.stats.extend(visible)
    path.write_bytes(trace.SerializeToString())
