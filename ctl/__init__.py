"""Custom training loops for TensorFlow 2, with the same code on one device, many devices or many machines.

Public names are imported on first use. `import ctl` does not import TensorFlow or another large package.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ctl.io import early_signals as _early_signals
from ctl.io import log_filter as _quiet
from ctl.version import __version__

_NAMES = {
    "Callback": "ctl.callbacks.protocol",
    "Decision": "ctl.callbacks.protocol",
    "MemoryCallback": "ctl.callbacks.protocol",
    "NullCallback": "ctl.callbacks.protocol",
    "CheckpointError": "ctl.errors",
    "CheckpointManager": "ctl.checkpoints.protocol",
    "Audio": "ctl.metrics.figures",
    "BackupCheckpoints": "ctl.checkpoints.backup",
    "ChiefOnlyCheckpoints": "ctl.checkpoints.chief_only",
    "Config": "ctl.config",
    "ConsoleWriter": "ctl.metrics.console",
    "CtlError": "ctl.errors",
    "EarlyStopping": "ctl.callbacks.early_stopping",
    "Every": "ctl.callbacks.schedule",
    "Gradients": "ctl.step.gradient_settings",
    "Intervals": "ctl.callbacks.schedule",
    "KerasTrainer": "ctl.keras.trainer",
    "HostAllReduce": "ctl.distribute.host_allreduce",
    "History": "ctl.keras.history",
    "JsonlWriter": "ctl.metrics.jsonl",
    "Keep": "ctl.checkpoints.retention",
    "LossSpike": "ctl.callbacks.loss_spike",
    "Manifest": "ctl.checkpoints.protocol",
    "MemoryCheckpoints": "ctl.checkpoints.memory",
    "MemoryWriter": "ctl.metrics.memory",
    "Results": "ctl.metrics.results",
    "MlflowWriter": "ctl.trackers.mlflow_writer",
    "RunEnd": "ctl.metrics.protocol",
    "NonFiniteError": "ctl.errors",
    "NullCheckpoints": "ctl.checkpoints.protocol",
    "NullWriter": "ctl.metrics.protocol",
    "PeerLostError": "ctl.errors",
    "PrCurve": "ctl.metrics.figures",
    "ReduceOnPlateau": "ctl.callbacks.reduce_on_plateau",
    "Matrix": "ctl.metrics.figures",
    "MetricWriter": "ctl.metrics.protocol",
    "SaveBest": "ctl.callbacks.save_best",
    "OutOfMemory": "ctl.errors",
    "Stopped": "ctl.errors",
    "TensorBoardWriter": "ctl.metrics.tensorboard",
    "WandbWriter": "ctl.trackers.wandb_writer",
    "Topology": "ctl.distribute.topology",
    "Trainer": "ctl.trainer",
    "TrainerOptions": "ctl.trainer_options",
    "UsageError": "ctl.errors",
    "evaluate": "ctl.keras.fit",
    "example_numbers": "ctl.data.arrays",
    "find_learning_rate": "ctl.learning_rate_search",
    "fit": "ctl.keras.fit",
    "from_arrays": "ctl.data.arrays",
    "from_source": "ctl.data.random_access",
    "predict": "ctl.keras.fit",
    "synchronize_batch_norm": "ctl.keras.batch_norm",
    "make_strategy": "ctl.distribute.strategies",
    "run": "ctl.app",
    "scale_learning_rate": "ctl.step.optimizers",
    "shard": "ctl.data.sharding",
}

# a literal list, which type checkers read
__all__ = [  # noqa: RUF022
    "__version__", "Audio", "BackupCheckpoints", "Callback", "CheckpointError", "CheckpointManager",
    "ChiefOnlyCheckpoints", "Config", "ConsoleWriter", "CtlError", "Decision", "EarlyStopping", "Every",
    "Gradients", "History", "HostAllReduce", "Intervals", "JsonlWriter", "Keep", "KerasTrainer",
    "LossSpike", "Manifest", "Matrix", "MemoryCallback", "MemoryCheckpoints", "MemoryWriter",
    "MetricWriter", "MlflowWriter", "NonFiniteError", "NullCallback", "NullCheckpoints", "NullWriter",
    "OutOfMemory", "PeerLostError", "PrCurve", "ReduceOnPlateau", "Results", "RunEnd", "SaveBest",
    "Stopped", "TensorBoardWriter", "Topology", "Trainer", "TrainerOptions", "UsageError",
    "WandbWriter", "evaluate", "example_numbers", "find_learning_rate", "fit", "from_arrays", "from_source",
    "make_strategy", "predict", "run", "scale_learning_rate", "shard", "synchronize_batch_norm",
]  # fmt: skip

_early_signals.install_early_handlers()
_quiet.install_log_filter()


def __dir__() -> Any:
    return [*__all__, "hvd", "testing"]


if TYPE_CHECKING:
    from ctl import testing as testing
    from ctl.app import run as _run
    from ctl.callbacks.early_stopping import EarlyStopping
    from ctl.callbacks.loss_spike import LossSpike
    from ctl.callbacks.protocol import Callback, Decision, MemoryCallback, NullCallback
    from ctl.callbacks.reduce_on_plateau import ReduceOnPlateau
    from ctl.callbacks.save_best import SaveBest
    from ctl.callbacks.schedule import Every, Intervals
    from ctl.checkpoints.backup import BackupCheckpoints
    from ctl.checkpoints.chief_only import ChiefOnlyCheckpoints
    from ctl.checkpoints.memory import MemoryCheckpoints
    from ctl.checkpoints.protocol import CheckpointManager, Manifest, NullCheckpoints
    from ctl.checkpoints.retention import Keep
    from ctl.config import Config
    from ctl.data.arrays import example_numbers, from_arrays
    from ctl.data.random_access import from_source
    from ctl.data.sharding import shard
    from ctl.distribute.host_allreduce import HostAllReduce
    from ctl.distribute.strategies import make_strategy
    from ctl.distribute.topology import Topology
    from ctl.errors import (
        CheckpointError,
        CtlError,
        NonFiniteError,
        OutOfMemory,
        PeerLostError,
        Stopped,
        UsageError,
    )
    from ctl.keras.batch_norm import synchronize_batch_norm
    from ctl.keras.fit import evaluate, fit, predict
    from ctl.keras.history import History
    from ctl.keras.trainer import KerasTrainer
    from ctl.learning_rate_search import find_learning_rate
    from ctl.metrics.console import ConsoleWriter
    from ctl.metrics.figures import Audio, Matrix, PrCurve
    from ctl.metrics.jsonl import JsonlWriter
    from ctl.metrics.memory import MemoryWriter
    from ctl.metrics.protocol import MetricWriter, NullWriter, RunEnd
    from ctl.metrics.results import Results
    from ctl.metrics.tensorboard import TensorBoardWriter
    from ctl.setting_types import RunFunction
    from ctl.step.gradient_settings import Gradients
    from ctl.step.optimizers import scale_learning_rate
    from ctl.trackers.mlflow_writer import MlflowWriter
    from ctl.trackers.wandb_writer import WandbWriter
    from ctl.trainer import Trainer
    from ctl.trainer_options import TrainerOptions

    run: RunFunction = _run

else:  # otherwise type checkers accept every name

    def __getattr__(name: str) -> Any:
        if name == "testing":
            return importlib.import_module("ctl.testing")
        if name not in _NAMES:
            raise AttributeError(f"module 'ctl' has no {name!r}; it has {', '.join(sorted(_NAMES))}.")
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
