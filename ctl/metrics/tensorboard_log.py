"""TensorBoard files of a run in `logs/`: the folders `train/` and `eval/` with the same tags.

The tags are equal, so that TensorBoard draws both curves of a metric in one chart.

A restarted run adds TensorBoard's session log, on which TensorBoard hides all points after the restored
step. The fast data server of TensorBoard ignores it, and hides them with the next point of the same tag.
The files of earlier attempts are not changed.

The session of the hyperparameters is in `eval/`, or in `train/` without any evaluation. TensorBoard
searches the metrics of a session only in the run of the session, or below a run with a name, and the name
of `logs/` is ".". No experiment summary is written. Without it TensorBoard builds the columns from all
sessions below its --logdir, so that several runs can be compared. With several experiment summaries it
reads only one of them. The name of a trial has the settings, and a part of the run's identifier, because
TensorBoard shows trials with equal names as one. TensorBoard keeps the first session that it reads in a
run, so each session is in separate files, which a restarted run removes.
"""

from collections.abc import Mapping, Sequence

from ctl.io import paths
from ctl.metrics.event_files import EventFolder
from ctl.metrics.protocol import (
    AudioLogged,
    Ended,
    HistogramLogged,
    ImageLogged,
    RunEnd,
    RunInfo,
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
    layout_summary,
    model_card,
    scalars_summary,
    session_end_summary,
    session_start_summary,
    text_summary,
)
from tensorboard.compat.proto import event_pb2

_SESSION_SUFFIX = ".session"
_NUM_ID_DIGITS = 6  # of the run's identifier in the name of a trial


class TensorBoardLog:
    """TensorBoard files of one run. Methods write on the caller's thread, and raise OSError.

    Args:
      logs_dir: Parent directory of `train` and `eval`.
    """

    def __init__(self, logs_dir: paths.AnyPath) -> None:
        self._logs_dir = logs_dir
        self._folders: dict[str, EventFolder] = {}
        self._started: Started | None = None
        self._session: EventFolder | None = None
        self._has_graph = False
        self._started_runs: set[str] = set()
        self._set_names: tuple[str, ...] = ()
        self._tags: dict[str, set[str]] = {}  # tags in the layout of each run

    def separate_sets(self, names: Sequence[str]) -> None:
        """Writes metrics of these evaluation sets, such as "clean/loss", as separate runs."""
        self._set_names = tuple(names)

    def scalars(self, wall_time: float, step: int, values: Mapping[str, float], run: str) -> None:
        """Writes one event with all values to the files of `run`, or one to the files of each set."""
        values_by_run: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            run_of_set, tag = self._split(run, name)
            values_by_run.setdefault(run_of_set, {})[tag] = value
        for run_of_set, values_of_run in values_by_run.items():
            self._scalars_of_run(wall_time, step, values_of_run, run_of_set)

    def _split(self, run: str, name: str) -> tuple[str, str]:
        """Returns the run and the tag of a metric: ("eval/clean", "loss") for "clean/loss" of that set."""
        set_name, _, tag = name.partition("/")
        return (f"{run}/{set_name}", tag) if run == "eval" and set_name in self._set_names else (run, name)

    def _scalars_of_run(self, wall_time: float, step: int, values: Mapping[str, float], run: str) -> None:
        self._begin_run(run, wall_time)
        tags = self._tags.setdefault(run, set())
        if not tags >= values.keys():
            self._folder(run).add(wall_time, step, summary=layout_summary(tags | values.keys()))
            tags.update(values)
        self._folder(run).add(wall_time, step, summary=scalars_summary(values))

    def show(self, event: Shown, wall_time: float) -> None:
        """Writes a text, histogram, image, sound, curve or shares to the files of the run."""
        if isinstance(event, SharesLogged):
            values = {f"{event.name}/{part}": share for part, share in event.shares.items()}
            self.scalars(wall_time, event.step, values, event.run)
            return
        run, tag = self._split(event.run, event.name)
        self._begin_run(run, wall_time)
        if isinstance(event, TextLogged):
            summary = text_summary(tag, event.text)
        elif isinstance(event, HistogramLogged):
            summary = histogram_summary(tag, event.edges, event.counts)
        elif isinstance(event, ImageLogged):
            summary = image_summary(tag, event.png, event.width, event.height)
        elif isinstance(event, AudioLogged):
            summary = audio_summary(tag, event.wav)
        else:
            summary = curve_summary(tag, event.table)
        self._folder(run).add(wall_time, event.step, summary=summary)

    def start(self, event: Started, wall_time: float) -> None:
        """Hides the points of an earlier attempt after `event.step`, and writes the text cards again."""
        self.close()
        self._started, self._session, self._has_graph = event, None, False
        self._started_runs, self._tags = set(), {}
        for run in ("train", "eval", *self._runs_of_sets()):
            for path in self._folder(run).files():
                if path.name.endswith(_SESSION_SUFFIX):
                    path.unlink(missing_ok=True)
            if run == "train" or self._folder(run).files():
                self._begin_run(run, wall_time)
        cards = {MODEL_TAG: model_card(event.info.model, event.info.parameters)}
        if event.info.config or event.resumed_from:
            cards[CONFIGURATION_TAG] = configuration_card(event.info.config, event.resumed_from)
        for tag, markdown in cards.items():
            self._folder("train").add(wall_time, event.step, summary=text_summary(tag, markdown))

    def _runs_of_sets(self) -> list[str]:
        """Returns the runs that earlier attempts wrote for evaluation sets."""
        folder = self._logs_dir / "eval"
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
        return [f"eval/{name}" for name in sorted(names)]

    def trace(self, event: Traced, wall_time: float) -> None:
        """Writes the first graph of this run. TensorBoard shows the newest graph."""
        if self._has_graph:
            return
        step = self._started.step if self._started else 0
        self._folder("train").add(wall_time, step, graph_def=event.graph_def.SerializeToString())
        self._has_graph = True

    def end(self, event: Ended, wall_time: float) -> None:
        """Writes the end of the session, with the status success or failure, and closes all files."""
        self.close()
        if self._session is None:
            has_evaluations = self._folder("eval").files()  # possibly of another program
            self._begin_session("eval" if has_evaluations else "train", wall_time)
        if self._session is not None:
            end = session_end_summary(event.end is not RunEnd.FAILED, wall_time)
            self._session.add(wall_time, event.step, summary=end)
            self._session.close()
        self._started, self._session = None, None

    def flush(self) -> None:
        """Writes all pending records, so that other processes can read them."""
        for folder in self._folders.values():
            folder.flush()

    def close(self) -> None:
        """Closes all files. The next event starts new files."""
        for folder in self._folders.values():
            folder.close()

    def discard(self) -> None:
        """Discards all pending events."""
        for folder in self._folders.values():
            folder.discard()

    def _folder(self, run: str) -> EventFolder:
        if run not in self._folders:
            self._folders[run] = EventFolder(self._logs_dir / run)
        return self._folders[run]

    def _session_folder(self, run: str) -> EventFolder:
        return EventFolder(self._logs_dir / run, _SESSION_SUFFIX)

    def _begin_run(self, run: str, wall_time: float) -> None:
        """Writes a session log before the first event of a run after each start."""
        if self._started is None or run in self._started_runs:
            return
        if run.partition("/")[0] == "eval" and self._session is None:
            self._begin_session("eval", wall_time)
        for _ in range(2):  # TensorBoard ignores the first session log of a run, and evaluators write none
            restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._folder(run).add(wall_time, self._started.step + 1, session_log=restart)
        self._started_runs.add(run)

    def _begin_session(self, run: str, wall_time: float) -> None:
        """Writes a complete file, because TensorBoard reads no file after it has read a newer one."""
        if self._started is None or not self._started.info.hparams:
            return
        info = self._started.info
        start = session_start_summary(info.hparams, wall_time, _trial_name(info))
        session = self._session_folder(run)
        session.add(wall_time, self._started.step, summary=start)
        session.close()
        self._session = session


def _trial_name(info: RunInfo) -> str:
    """Returns a name that no other run has, e.g. "learning_rate=0.01,seed=0 (3fa9c1)"."""
    return f"{info.name} ({info.run_id[:_NUM_ID_DIGITS]})" if info.name and info.run_id else info.name
