"""TensorBoard files of a run in `logs/`: the folders `train/` and `eval/` with the same tags.

The tags are equal, so that TensorBoard draws both curves of a metric in one chart.

The session of the hyperparameters is in `eval/`, or in `train/` without any evaluation. TensorBoard
searches the metrics of a session only in the run of the session, or below a run with a name, and the name
of `logs/` is ".". No experiment summary is written. Without it TensorBoard builds the columns from all
sessions below its --logdir, so that several runs can be compared. With several experiment summaries it
reads only one of them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ctl.metrics.event_files import EventFolder
from ctl.metrics.protocol import (
    AudioLogged,
    Ended,
    HistogramLogged,
    ImageLogged,
    RunEnd,
    SharesLogged,
    Shown,
    Started,
    TextLogged,
    Traced,
)
from ctl.metrics.summaries import (
    CONFIGURATION_TAG,
    MODEL_TAG,
    audio_summary,
    configuration_card,
    curve_summary,
    histogram_summary,
    image_summary,
    is_card_or_session,
    layout_summary,
    model_card,
    scalars_summary,
    session_end_summary,
    session_start_summary,
    text_summary,
)
from tensorboard.compat.proto import event_pb2


class TensorBoardLog:
    """TensorBoard files of one run. Methods write on the caller's thread, and raise OSError.

    Args:
      logs_dir: Parent directory of `train` and `eval`.
      clock: Function that returns the Unix time (seconds). All times are of this kind.
    """

    def __init__(self, logs_dir: Path, clock: Callable[[], float]) -> None:
        self._logs_dir = logs_dir
        self._clock = clock
        self._folders: dict[str, EventFolder] = {}
        self._started: Started | None = None
        self._session: EventFolder | None = None
        self._has_graph = False
        self._started_runs: set[str] = set()
        self._tags: dict[str, set[str]] = {}  # tags in the layout of each run

    def scalars(self, wall_time: float, step: int, values: Mapping[str, float], run: str) -> None:
        """Writes one event with all values to the files of `run`."""
        self._begin_run(run, wall_time)
        tags = self._tags.setdefault(run, set())
        if not tags >= values.keys():
            tags.update(values)
            self._folder(run).add(wall_time, step, summary=layout_summary(tags))
        self._folder(run).add(wall_time, step, summary=scalars_summary(values))

    def show(self, event: Shown, wall_time: float) -> None:
        """Writes a text, histogram, image, sound, curve or shares to the files of the run."""
        if isinstance(event, SharesLogged):
            values = {f"{event.name}/{part}": share for part, share in event.shares.items()}
            self.scalars(wall_time, event.step, values, event.run)
            return
        self._begin_run(event.run, wall_time)
        if isinstance(event, TextLogged):
            summary = text_summary(event.name, event.text)
        elif isinstance(event, HistogramLogged):
            summary = histogram_summary(event.name, event.edges, event.counts)
        elif isinstance(event, ImageLogged):
            summary = image_summary(event.name, event.png, event.width, event.height)
        elif isinstance(event, AudioLogged):
            summary = audio_summary(event.name, event.wav)
        else:
            summary = curve_summary(event.name, event.table)
        self._folder(event.run).add(wall_time, event.step, summary=summary)

    def start(self, event: Started, wall_time: float) -> None:
        """Removes the events of an earlier attempt after `event.step`, and writes the text cards again."""
        self.close()
        self._started, self._session, self._has_graph = event, None, False
        self._started_runs, self._tags = set(), {}
        for run in ("train", "eval"):
            if self._folder(run).paths():
                self._folder(run).keep_only(lambda old: _is_valid(old, event.step))
                self._begin_run(run, wall_time)
        self._begin_run("train", wall_time)
        cards = {MODEL_TAG: model_card(event.info.model, event.info.parameters)}
        if event.info.config or event.resumed_from:
            cards[CONFIGURATION_TAG] = configuration_card(event.info.config, event.resumed_from)
        for tag, markdown in cards.items():
            self._folder("train").add(wall_time, event.step, summary=text_summary(tag, markdown))
        self.flush()

    def trace(self, event: Traced, wall_time: float) -> None:
        """Writes the first graph of this run, which replaces the graph of an earlier attempt."""
        if self._has_graph:
            return
        self._has_graph = True
        train = self._folder("train")
        train.keep_only(lambda old: old.WhichOneof("what") != "graph_def")
        step = self._started.step if self._started else 0
        train.add(wall_time, step, graph_def=event.graph_def.SerializeToString())

    def end(self, event: Ended, wall_time: float) -> None:
        """Writes the end of the session, with the status success or failure, and closes all files."""
        if self._session is None:
            has_evaluations = self._folder("eval").paths()  # possibly of another program
            self._begin_session("eval" if has_evaluations else "train", wall_time)
        if self._session is not None:
            end = session_end_summary(event.end is not RunEnd.FAILED, wall_time)
            self._session.add(wall_time, event.step, summary=end)
        self._started, self._session = None, None
        self.close()

    def flush(self) -> None:
        """Writes all pending records, so that other processes can read them."""
        for folder in self._folders.values():
            folder.flush()

    def close(self) -> None:
        """Closes all files. The next event starts new files."""
        for folder in self._folders.values():
            folder.close()

    def _folder(self, run: str) -> EventFolder:
        if run not in self._folders:
            self._folders[run] = EventFolder(self._logs_dir / run, self._clock)
        return self._folders[run]

    def _begin_run(self, run: str, wall_time: float) -> None:
        """Writes a restart before the first event of a run after each start."""
        if self._started is None or run in self._started_runs:
            return
        self._started_runs.add(run)
        # A running TensorBoard discards the events that it has read from this step on.
        restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._folder(run).add(wall_time, self._started.step + 1, session_log=restart)
        if run == "eval":
            self._begin_session(run, wall_time)

    def _begin_session(self, run: str, wall_time: float) -> None:
        if self._started is None or not self._started.info.hparams:
            return
        start = session_start_summary(self._started.info.hparams, wall_time)
        self._session = self._folder(run)
        self._session.add(wall_time, self._started.step, summary=start)


def _is_valid(event: Any, last_step: int) -> bool:
    """Returns True if an event of an earlier attempt stays when training resumes after `last_step`."""
    if event.WhichOneof("what") == "session_log" or is_card_or_session(event):
        return False
    return event.step <= last_step
