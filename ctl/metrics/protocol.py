"""Base class of metric writers, and the events of a run.

    class Printed(ctl.MetricWriter):
        def write(self, step, values, run="train"): ...   # metrics at a step
        def note(self, event): ...                        # a run started, a checkpoint was saved, ...

The trainer calls writers on the chief only, always from the thread that trains. A writer that raises an
error is removed with a warning, and training continues.

An object with these two methods is a writer, too; see `ctl.metrics.adapter`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """What does not change during a run."""

    model: str  # name of the Trainer subclass
    strategy: str  # the word, e.g. "multi_worker"
    num_workers: int
    num_replicas: int  # over all workers
    global_batch_size: int  # examples
    data: str  # one line about the training data
    precision: str  # e.g. "float32", "mixed_bfloat16"
    seed: int
    model_dir: str | None
    parameters: tuple[tuple[str, tuple[int, ...], str, bool], ...] = ()
    # ^ (name, shape, dtype, trainable) of every weight
    config: Mapping[str, Any] = field(default_factory=dict)  # everything, JSON-able
    hparams: Mapping[str, Any] = field(default_factory=dict)  # what a user tunes: bool, number, str


@dataclass(frozen=True)
class Started:
    """Training begins at `step` completed steps (0, or where a checkpoint was restored)."""

    step: int
    total_steps: int | None  # None: until the data ends
    info: RunInfo
    resumed_from: str | None = None  # one line for people, or None on a fresh start
    compiles: bool = True  # the first loop traces and compiles; False where an earlier run did


@dataclass(frozen=True)
class Traced:
    """The step's graph exists; comes after each loop that compiled, before its `Progressed`."""

    graph_def: Any  # a `tf.compat.v1.GraphDef`


@dataclass(frozen=True)
class Progressed:
    """`step` steps are complete; comes after every loop, so it must cost next to nothing."""

    step: int


@dataclass(frozen=True)
class TextLogged:
    """A text at a step, in Markdown, for writers that can show one."""

    step: int
    name: str
    text: str
    run: str = "train"


@dataclass(frozen=True)
class HistogramLogged:
    """How often values lie in each of a row of intervals, for writers that can show that."""

    step: int
    name: str
    edges: tuple[float, ...]  # ascending; one more than counts
    counts: tuple[float, ...]
    run: str = "train"


@dataclass(frozen=True)
class ImageLogged:
    """An image at a step, for writers that can show one."""

    step: int
    name: str
    png: bytes
    width: int  # pixels
    height: int
    run: str = "train"


@dataclass(frozen=True)
class AudioLogged:
    """A sound at a step, for writers that can play one."""

    step: int
    name: str
    wav: bytes
    run: str = "train"


@dataclass(frozen=True)
class CurveLogged:
    """A precision-recall curve at a step, for writers that can show one."""

    step: int
    name: str
    table: Any  # `[6, n]` for n thresholds from 0 to 1: true and false positives, true and false
    # ^ negatives, precision, recall
    run: str = "train"


@dataclass(frozen=True)
class SharesLogged:
    """Shares of something whole at a step, by name, for writers that can draw a chart."""

    step: int
    name: str
    shares: Mapping[str, float]
    run: str = "train"


@dataclass(frozen=True)
class Saved:
    """A checkpoint was committed."""

    step: int
    path: str


class RunEnd(enum.Enum):
    """Causes for the end of a run."""

    DONE = "done"
    DATA_ENDED = "data ended"
    FEWER_DATA_THAN_STEPS = "fewer data than steps"  # the length of the data was known before
    NO_STEPS_LEFT = "no steps left"  # all steps were complete before the run
    STOPPED = "stopped"  # by a callback or a hook
    SIGNAL = "stopped by a signal"
    TRAINING_ENDED = "the training has ended"  # end of an evaluator
    FAILED = "failed"


@dataclass(frozen=True)
class Ended:
    """End of a run, sent exactly once, also after an error. Writers flush and close their files.

    Attributes:
      step: Completed steps.
      end: Cause of the end.
      summary: Label -> value, shown to people in this order.
      sentences: Sentences shown before the summary, such as the reason of a callback that stopped the run.
      requested_steps: The steps that the user requested, or None.
      detail: Name of the error's class; of an evaluator, the reason for which the training ended.
    """

    step: int
    end: RunEnd
    summary: Mapping[str, Any] = field(default_factory=dict)
    sentences: tuple[str, ...] = ()
    requested_steps: int | None = None
    detail: str = ""

    @property
    def reason(self) -> str:
        """The cause as a phrase for people, such as "done" or "failed: ValueError"."""
        requested = self.requested_steps
        if self.end is RunEnd.FEWER_DATA_THAN_STEPS:
            return f"the data ended, {requested} steps were asked for,"
        if self.end is RunEnd.NO_STEPS_LEFT:
            if requested is None or requested >= self.step:
                return "nothing left to do: complete"
            return f"nothing left to do, {requested} steps were requested: complete"
        if self.end is RunEnd.TRAINING_ENDED:
            return f"{self.end.value} ({self.detail})"
        return f"{self.end.value}: {self.detail}" if self.detail else self.end.value


Shown = TextLogged | HistogramLogged | ImageLogged | AudioLogged | CurveLogged | SharesLogged
Event = Started | Traced | Progressed | Shown | Saved | Ended


class MetricWriter:
    """Base class of receivers of the metrics and events of a run. Its methods are no-ops.

    Attributes:
      everywhere: True calls the writer on all workers, not only on the chief.
      metric: Name of a metric that the evaluation must return, or None.
    """

    everywhere: bool = False
    metric: str | None = None

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Receives metrics at `step` completed steps; `run` is "train" or "eval"."""

    def note(self, event: Event) -> None:
        """Receives an event. Unknown events are to be ignored."""

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
