"""Custom training loops for TensorFlow 2, the same file on one device, several, or many machines.

Names are loaded when first used: `import ctl` alone imports neither TensorFlow nor anything large.
"""

import importlib
from typing import TYPE_CHECKING

from ctl import quiet as _quiet
from ctl.version import __version__

_NAMES = {
    "Agreement": "ctl.agreement",
    "CheckpointError": "ctl.errors",
    "CheckpointManager": "ctl.checkpoints.protocol",
    "BackupCheckpoints": "ctl.checkpoints.backup",
    "ChiefOnlyCheckpoints": "ctl.checkpoints.chief_only",
    "ConsoleReport": "ctl.reports.console",
    "CtlError": "ctl.errors",
    "EarlyStopping": "ctl.watchers",
    "Every": "ctl.every",
    "Gradients": "ctl.gradients",
    "Intervals": "ctl.every",
    "KerasTrainer": "ctl.keras_training",
    "History": "ctl.fitting",
    "JsonlReport": "ctl.reports.jsonl",
    "Keep": "ctl.checkpoints.retention",
    "LossSpike": "ctl.spikes",
    "Manifest": "ctl.checkpoints.protocol",
    "MemoryCheckpoints": "ctl.checkpoints.memory",
    "MemoryReport": "ctl.reports.memory",
    "NonFiniteError": "ctl.errors",
    "NullCheckpoints": "ctl.checkpoints.protocol",
    "NullReport": "ctl.reports.protocol",
    "PeerLostError": "ctl.errors",
    "ReduceOnPlateau": "ctl.watchers",
    "Report": "ctl.reports.protocol",
    "SaveBest": "ctl.watchers",
    "OutOfMemory": "ctl.errors",
    "Stopped": "ctl.errors",
    "TensorBoardReport": "ctl.reports.tensorboard",
    "Trainer": "ctl.trainer",
    "UsageError": "ctl.errors",
    "evaluate": "ctl.fitting",
    "example_numbers": "ctl.arrays",
    "fit": "ctl.fitting",
    "from_arrays": "ctl.arrays",
    "make_strategy": "ctl.strategies",
    "run": "ctl.app",
    "scale_learning_rate": "ctl.gradients",
    "shard": "ctl.sharding",
}
_OTHER_NAME = {"make_strategy": "make"}

__all__ = ["__version__", *sorted(_NAMES)]

_quiet.install()


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module 'ctl' has no {name!r}; it has {', '.join(sorted(_NAMES))}.")
    value = getattr(importlib.import_module(_NAMES[name]), _OTHER_NAME.get(name, name))
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_NAMES})


if TYPE_CHECKING:
    from ctl.agreement import Agreement
    from ctl.app import run
    from ctl.arrays import example_numbers, from_arrays
    from ctl.checkpoints.backup import BackupCheckpoints
    from ctl.checkpoints.chief_only import ChiefOnlyCheckpoints
    from ctl.checkpoints.memory import MemoryCheckpoints
    from ctl.checkpoints.protocol import CheckpointManager, Manifest, NullCheckpoints
    from ctl.checkpoints.retention import Keep
    from ctl.errors import (
        CheckpointError,
        CtlError,
        NonFiniteError,
        OutOfMemory,
        PeerLostError,
        Stopped,
        UsageError,
    )
    from ctl.every import Every, Intervals
    from ctl.fitting import History, evaluate, fit
    from ctl.gradients import Gradients, scale_learning_rate
    from ctl.keras_training import KerasTrainer
    from ctl.reports.console import ConsoleReport
    from ctl.reports.jsonl import JsonlReport
    from ctl.reports.memory import MemoryReport
    from ctl.reports.protocol import NullReport, Report
    from ctl.reports.tensorboard import TensorBoardReport
    from ctl.sharding import shard
    from ctl.spikes import LossSpike
    from ctl.strategies import make as make_strategy
    from ctl.trainer import Trainer
    from ctl.watchers import EarlyStopping, ReduceOnPlateau, SaveBest
