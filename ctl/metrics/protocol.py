"""Base class of metric writers, and the events of a run.

Example: a writer of a user that keeps one table of a run.

    class RunTable(ctl.MetricWriter):
        def __init__(self):
            self.rows, self.checkpoints, self.exports, self.end = {}, [], [], None

        def write(self, step, values, run="train"):  # run is "train" or "eval"
            self.rows[run, step] = dict(values)

        def note(self, event):
            if isinstance(event, protocol.Started):
                self.run_id, self.hparams = event.info.run_id, dict(event.info.hparams)
            elif isinstance(event, protocol.Saved):
                self.checkpoints.append(event.step)
            elif isinstance(event, protocol.Exported):
                self.exports += event.paths
            elif isinstance(event, protocol.Ended):
                self.end = (event.status, event.error)  # ("failed", "ValueError: ...") after an error

The order of the events of a run is `Started`, then `Traced`, `Progressed`, `EvaluationSets`, `Saved`, the
events of `Shown` and `Exported`, and finally `Ended`. A run that rolls back sends another `Started`. A
process that adds metrics to the run of another process sends `Joined` in place of `Started`.

The trainer calls writers on the chief only. A writer that raises an error is removed with a warning, and
training continues. An object with the two methods is a writer, too; see `ctl.metrics.adapter`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ctl.callbacks.schedule import EpochLength


@dataclass(frozen=True)
class RunInfo:
    """Description of a run.

    Attributes:
      model: Name of the Trainer subclass.
      strategy: Name of the strategy, e.g. "multi_worker".
      num_workers: Number of workers.
      num_replicas: Number of replicas of all workers.
      global_batch_size: Global batch size (examples).
      data: One line about the training data.
      precision: Name of the dtype policy, e.g. "float32" or "mixed_bfloat16".
      seed: Seed of the run.
      model_dir: Directory of checkpoints, or None.
      parameters: Tuple (name, shape, dtype, is_trainable) of each weight.
      config: All settings, with values that JSON can represent.
      hparams: Hyperparameters: values of type bool, int, float or str.
      run_id: Identifier of the run, which is the same after a resume in `model_dir`. Empty on workers other
        than the chief.
      name: Settings of the run as text, e.g. "learning_rate=0.01,seed=0".
    """

    model: str
    strategy: str
    num_workers: int
    num_replicas: int
    global_batch_size: int
    data: str
    precision: str
    seed: int
    model_dir: str | None
    parameters: tuple[tuple[str, tuple[int, ...], str, bool], ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    hparams: Mapping[str, Any] = field(default_factory=dict)
    run_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Started:
    """Start of a run.

    Attributes:
      step: Number of completed steps: 0, or the step of the restored checkpoint.
      total_steps: Number of steps at the end of the run. None: the run ends with the data.
      info: Description of the run.
      resumed_from: One line about the restored checkpoint. None: a new run.
      compiles: True if the first loop traces and compiles, False if an earlier run has done so.
    """

    step: int
    total_steps: int | None
    info: RunInfo
    resumed_from: str | None = None
    compiles: bool = True


@dataclass(frozen=True)
class Joined:
    """Addition of metrics to the run of another process: by an evaluator, or with --mode=eval.

    The next `Ended` is the end of this process, not of the run.

    Attributes:
      run_id: `RunInfo.run_id` of the run.
      model: Name of the Trainer subclass.
      model_dir: Directory of the run.
    """

    run_id: str
    model: str
    model_dir: str


@dataclass(frozen=True)
class Traced:
    """Graph of a step. It is sent after each loop that has compiled, before the `Progressed` of the loop.

    Attributes:
      graph_def: A `tf.compat.v1.GraphDef`.
    """

    graph_def: Any


@dataclass(frozen=True)
class Progressed:
    """Completion of `step` steps, sent after every loop. Writers must handle it quickly."""

    step: int


@dataclass(frozen=True)
class TextLogged:
    """A text in Markdown at a step, for writers that support it."""

    step: int
    name: str
    text: str
    run: str = "train"


@dataclass(frozen=True)
class HistogramLogged:
    """A histogram at a step, for writers that support it.

    Attributes:
      edges: Ascending edges of the intervals, `[n + 1]`.
      counts: Number of values in each interval, `[n]`.
    """

    step: int
    name: str
    edges: tuple[float, ...]
    counts: tuple[float, ...]
    run: str = "train"


@dataclass(frozen=True)
class ImageLogged:
    """An image at a step, for writers that support it.

    Attributes:
      png: Content of a PNG file.
      width: Width (pixels).
      height: Height (pixels).
    """

    step: int
    name: str
    png: bytes
    width: int
    height: int
    run: str = "train"


@dataclass(frozen=True)
class AudioLogged:
    """A sound at a step, as the content of a WAV file, for writers that support it."""

    step: int
    name: str
    wav: bytes
    run: str = "train"


@dataclass(frozen=True)
class CurveLogged:
    """A precision-recall curve at a step, for writers that support it.

    Attributes:
      table: Float32 `[6, n]` for n thresholds from 0 to 1. The rows are true positives, false positives,
        true negatives, false negatives, precision and recall.
    """

    step: int
    name: str
    table: Any
    run: str = "train"


@dataclass(frozen=True)
class SharesLogged:
    """Shares of a total at a step, for writers that support it.

    Attributes:
      shares: Share by name, from 0 to 1.
    """

    step: int
    name: str
    shares: Mapping[str, float]
    run: str = "train"


@dataclass(frozen=True)
class Saved:
    """Commit of a checkpoint.

    Attributes:
      step: Step of the checkpoint.
      path: Directory of the checkpoint.
    """

    step: int
    path: str


@dataclass(frozen=True)
class Exported:
    """Export of a model at the end of a run.

    Attributes:
      step: Step of the exported weights.
      paths: Exported files and directories, or their URLs.
    """

    step: int
    paths: tuple[str, ...]


@dataclass(frozen=True)
class EvaluationSets:
    """Names of the evaluation sets, with metrics such as "clean/loss", of the next call of `write`.

    Attributes:
      names: Names such as "clean". Empty if `eval_data` returns a single set.
    """

    names: tuple[str, ...]


class RunEnd(enum.Enum):
    """Causes for the end of a run."""

    DONE = "done"
    DATA_ENDED = "data ended"
    FEWER_DATA_THAN_STEPS = "fewer data than steps"  # for data of known length
    NO_STEPS_LEFT = "no steps left"  # all steps were complete before the run
    STOPPED = "stopped"  # by a callback or a hook
    SIGNAL = "stopped by a signal"
    TIME_LIMIT = "stopped by the time limit"
    TRAINING_ENDED = "the training has ended"  # end of an evaluator
    WORKERS_CHANGED = "the workers have changed"  # of an elastic job, which continues
    FAILED = "failed"


@dataclass(frozen=True)
class Ended:
    """End of a run, sent exactly once, also after an error. Writers flush and close their files.

    Attributes:
      step: Completed steps.
      end: Cause of the end.
      summary: Value by label, in the order in which the console prints them.
      sentences: Sentences to print before the summary, such as the reason of a callback that stopped the
        run.
      requested_steps: Number of steps that the user requested, or None.
      detail: Name of the error's class; of an evaluator, the reason for which the training ended.
      error: Class and first line of the error, e.g. "ValueError: bad batch". Empty without an error.
    """

    step: int
    end: RunEnd
    summary: Mapping[str, Any] = field(default_factory=dict)
    sentences: tuple[str, ...] = ()
    requested_steps: int | None = None
    detail: str = ""
    error: str = ""

    @property
    def status(self) -> str:
        """The status for experiment trackers.

        "failed" after an error; "stopped" if a callback, a signal or the time limit ended the run; else
        "done".
        """
        if self.end is RunEnd.FAILED:
            return "failed"
        is_stopped = self.end in (RunEnd.STOPPED, RunEnd.SIGNAL, RunEnd.TIME_LIMIT)
        return "stopped" if is_stopped else "done"

    @property
    def reason(self) -> str:
        """The cause for the console, e.g. "done" or "failed: ValueError"."""
        requested = self.requested_steps
        if self.end is RunEnd.FEWER_DATA_THAN_STEPS:
            return f"the data ended, {requested} steps were requested,"
        if self.end is RunEnd.NO_STEPS_LEFT:
            if requested is None or requested >= self.step:
                return "no steps left: complete"
            return f"no steps left, {requested} steps were requested: complete"
        if self.end is RunEnd.TRAINING_ENDED:
            return f"{self.end.value} ({self.detail})"
        return f"{self.end.value}: {self.detail}" if self.detail else self.end.value


Shown = TextLogged | HistogramLogged | ImageLogged | AudioLogged | CurveLogged | SharesLogged
Event = (
    Started | Joined | EpochLength | Traced | Progressed | Shown | Saved | Exported | EvaluationSets | Ended
)


class MetricWriter:
    """Base class of receivers of the metrics and events of a run. Its methods are no-ops.

    Attributes:
      everywhere: True calls the writer on all workers, not only on the chief.
      metric: Name of a metric that the evaluation must return, or None.
    """

    everywhere: bool = False
    metric: str | None = None

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Receives metrics.

        Args:
          step: Number of completed steps.
          values: Metric by name.
          run: "train" or "eval".
        """

    def note(self, event: Event) -> None:
        """Receives an event. A writer must ignore events of unknown types."""

    def abandon(self) -> bool:
        """Discards pending data because another job has taken over model_dir.

        Returns True if the writer must receive no further calls.
        """
        return False

    @property
    def class_name(self) -> str:
        """Name of the class for messages."""
        return type(self).__name__


class NullWriter(MetricWriter):
    """A writer without output."""
