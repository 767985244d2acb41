"""A trainer's watchers at work: they are told the numbers, and what they decide is done on all workers."""

import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.checkpoints import export as export_lib
from ctl.checkpoints.tracked_state import variables_of
from ctl.distribute.host_allreduce import Agreement
from ctl.distribute.keras_objects import plain
from ctl.io import paths
from ctl.training import validation

_log = logging.getLogger("ctl")
_NAMES = ("early_stopping", "plateau", "save_best", "spike")  # attributes of a trainer


class Watching:
    """The watchers of one trainer; without any it costs nothing.

    Attributes:
      stopped: a watcher asked the run to stop, now or in the run that was resumed.
    """

    def __init__(self, trainer: Any, agreement: Agreement):
        self._trainer = trainer
        self._agreement = agreement
        given = {name: getattr(trainer, name, None) for name in _NAMES}
        self._watchers = {name: w for name, w in given.items() if w is not None}
        validation.watchers(trainer, self._watchers)
        self._best_weights: list[np.ndarray] | None = None
        self.stopped = False
        self._wants_back = False

    def spiked(self) -> bool:
        """Whether a watcher has wanted to go back since the last call."""
        wants, self._wants_back = self._wants_back, False
        return wants

    def saw(self, step: int, values: Mapping[str, float], run: str) -> bool:
        """Tells the watchers numbers of `run`; True if one of them wants to stop."""
        for watcher in self._watchers.values():
            verdict = watcher.saw(step, values, run)
            if verdict.stop:
                self.stopped = True
                self._say("Stopping at step %d: %s has not improved.", step, watcher.metric)
            if verdict.factor != 1.0:
                self._reduce(step, verdict.factor, verdict.lowest)
            if verdict.remember:
                self._remember()
            if verdict.warning:
                self._say("Step %d: %s.", step, verdict.warning)
            self._wants_back |= verdict.roll_back
            if verdict.export:
                self._export(watcher)
        return self.stopped

    def state(self) -> dict[str, Any]:
        """JSON-able, for the manifest."""
        return {name: watcher.state for name, watcher in self._watchers.items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on where `saved = state()` was taken."""
        for name, watcher in self._watchers.items():
            if name in saved:
                watcher.state = saved[name]
        stopping = self._watchers.get("early_stopping")
        self.stopped = getattr(stopping, "stopped_at", None) is not None
        path = self._weights_path()
        if getattr(stopping, "restore_best", False) and path is not None:
            self._best_weights = _loaded(path) or _loaded(_beside(path))

    def end(self) -> None:
        """The run is over: gives the model its best weights, if that was asked for."""
        if self._best_weights is None:
            return
        for variable, value in zip(self._variables(), self._best_weights, strict=True):
            kind = variable.dtype.as_numpy_dtype
            variable.assign(value.view(kind) if value.dtype.kind == "V" else value)  # bfloat16 in .npz

    def _variables(self) -> list[tf.Variable]:
        return [plain(v) for v in variables_of(self._trainer.model)]

    def _remember(self) -> None:
        self._best_weights = [v.numpy() for v in self._variables()]
        path = self._weights_path()
        if path is None or not self._trainer.placement.is_chief:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(path)
        with temporary.open("wb") as file:
            np.savez(file, *self._best_weights)
        if paths.has_rename(path):
            temporary.replace(path)
        else:  # at every moment one of the two is whole
            paths.copy_tree(temporary, path)
            temporary.unlink()

    def _weights_path(self) -> Path | None:
        directory = self._trainer.model_dir
        return Path(directory) / "best" / "early_stopping.npz" if directory else None

    def _reduce(self, step: int, factor: float, lowest: float) -> None:
        optimizer = self._trainer.optimizer
        old = float(plain(optimizer.learning_rate).numpy())
        new = max(old * factor, lowest)
        if new < old:
            optimizer.learning_rate = new
            self._say("Step %d: the learning rate goes from %.3g to %.3g.", step, old, new)

    def _export(self, watcher: Any) -> None:
        trainer = self._trainer
        directory = watcher.directory or f"{trainer.model_dir}/best"
        served = export_lib.signatures_of(trainer)
        export_lib.export(trainer.model, directory, watcher.formats, trainer.placement, served)
        self._agreement.sum([0.0])  # the chief writes last; nobody trains on meanwhile

    def _say(self, text: str, *values: Any) -> None:
        if self._trainer.placement.is_chief:
            _log.warning(text, *values)


def _beside(path: Path) -> Path:
    """Where the weights are written before they take the place of those of before."""
    return path.with_name(f".{path.name}")


def _loaded(path: Path) -> list[np.ndarray] | None:
    """Arrays of an .npz file; None without one, or if its writing was interrupted."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return [file[f"arr_{i}"] for i in range(len(file.files))]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
