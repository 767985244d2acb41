"""What a run leaves in `logs/` for TensorBoard: `train/` and `eval/` with the same tags.

Both curves of a tag are in one chart because the tags are equal. The hyperparameters' session
lives in `eval/` (in `train/` if nothing is ever evaluated), because TensorBoard finds the metrics
of a session only in its own run, or below a run that has a name; `logs/` itself is called ".". No
experiment summary is written: without one TensorBoard makes the columns from what all sessions
under its --logdir hold, so several runs can be compared; with several of them it reads only one.
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
    """Writes at once, on the caller's thread; times are Unix seconds. Raises OSError."""

    def __init__(self, logs_dir: Path, clock: Callable[[], float]) -> None:
        self._logs_dir = logs_dir
        self._clock = clock
        self._folders: dict[str, EventFolder] = {}
        self._started: Started | None = None
        self._session: EventFolder | None = None
        self._traced = False
        self._begun: set[str] = set()
        self._tags: dict[str, set[str]] = {}  # of each run, in the layout that it has

    def scalars(self, wall_time: float, step: int, values: Mapping[str, float], run: str) -> None:
        """One event with all values in the files of `run`."""
        self._begin(run, wall_time)
        known = self._tags.setdefault(run, set())
        if not known >= values.keys():
            known.update(values)
            self._folder(run).add(wall_time, step, summary=layout_summary(known))
        self._folder(run).add(wall_time, step, summary=scalars_summary(values))

    def show(self, event: Shown, wall_time: float) -> None:
        """A text, a histogram, an image, a sound, a curve or shares in the files of its run."""
        if isinstance(event, SharesLogged):
            values = {f"{event.name}/{part}": share for part, share in event.shares.items()}
            self.scalars(wall_time, event.step, values, event.run)
            return
        self._begin(event.run, wall_time)
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
        """Takes back what an earlier attempt wrote beyond `event.step`; cards are written anew."""
        self.close()
        self._started, self._session, self._traced = event, None, False
        self._begun, self._tags = set(), {}
        for run in ("train", "eval"):
            if self._folder(run).paths():
                self._folder(run).keep_only(lambda old: _outlives(old, event.step))
                self._begin(run, wall_time)
        self._begin("train", wall_time)
        cards = {MODEL_TAG: model_card(event.info.model, event.info.parameters)}
        if event.info.config or event.resumed_from:
            cards[CONFIGURATION_TAG] = configuration_card(event.info.config, event.resumed_from)
        for tag, markdown in cards.items():
            self._folder("train").add(wall_time, event.step, summary=text_summary(tag, markdown))
        self.flush()

    def trace(self, event: Traced, wall_time: float) -> None:
        """The graph replaces that of an earlier attempt; only the first of this run counts."""
        if self._traced:
            return
        self._traced = True
        train = self._folder("train")
        train.keep_only(lambda old: old.WhichOneof("what") != "graph_def")
        step = self._started.step if self._started else 0
        train.add(wall_time, step, graph_def=event.graph_def.SerializeToString())

    def end(self, event: Ended, wall_time: float) -> None:
        """Writes the end of the session, as a success or a failure, and closes all files."""
        if self._session is None:
            evaluated = self._folder("eval").paths()  # maybe by another program
            self._begin_session("eval" if evaluated else "train", wall_time)
        if self._session is not None:
            end = session_end_summary(event.end is not RunEnd.FAILED, wall_time)
            self._session.add(wall_time, event.step, summary=end)
        self._started, self._session = None, None
        self.close()

    def flush(self) -> None:
        """Makes everything visible to other processes."""
        for folder in self._folders.values():
            folder.flush()

    def close(self) -> None:
        """Ends all files; the next event begins new ones."""
        for folder in self._folders.values():
            folder.close()

    def _folder(self, run: str) -> EventFolder:
        if run not in self._folders:
            self._folders[run] = EventFolder(self._logs_dir / run, self._clock)
        return self._folders[run]

    def _begin(self, run: str, wall_time: float) -> None:
        """Before the first event of a run after each start."""
        if self._started is None or run in self._begun:
            return
        self._begun.add(run)
        # A TensorBoard that is running forgets what it read from this step on.
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


def _outlives(event: Any, last_step: int) -> bool:
    """Whether an event of an earlier attempt stays when training goes on after `last_step`."""
    if event.WhichOneof("what") == "session_log" or is_card_or_session(event):
        return False
    return event.step <= last_step
