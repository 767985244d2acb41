"""Validation of the settings and the data of elastic training.

ctl launch --workers=1:3 -- python -m models.mnist      # the launcher sets CTL_ELASTIC
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import tensorflow as tf
from ctl.config import Config
from ctl.data.batches import Batches
from ctl.distribute.platforms import detection
from ctl.errors import UsageError
from ctl.hvd import elastic_line
from ctl.setting_values import WORKER_RANGE_VARIABLE, WorkerRange, parse_worker_range
from ctl.step.gradient_settings import Gradients

_FIX = "Leave it out, or start a fixed number of workers (`ctl launch --workers=N`)"
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {  # values by setting; another value is rejected
    "strategy": ("auto", "multi_worker"),
    "communication": ("auto", "tcp"),
    "mode": ("train_and_eval", "train"),
    "jit_compile": ("off",),
    "data_position": ("auto", "indexed", "skip"),
    "on_nonfinite": ("stop", "skip"),
    "sync_every": (1,),
    "max_secs": (0.0,),
    "num_virtual_devices": (0, 1),
    "devices": ((),),
    "tpu": ("",),
    "variable_partitioner": ("",),
    "check_collectives": (False,),
    "fast_dev_run": (False,),
}


def is_requested(config: Config) -> bool:
    """Returns True if workers may join and leave during the run."""
    return bool(config.elastic or os.environ.get(WORKER_RANGE_VARIABLE))


def check_settings(config: Config) -> WorkerRange:
    """Returns the limits of the number of workers.

    Raises:
      UsageError: If the job has no launcher that replaces workers, or for an unsupported setting.
    """
    by_launcher = os.environ.get(WORKER_RANGE_VARIABLE, "")
    text = config.elastic or by_launcher
    limits = parse_worker_range("elastic", text)
    if not (elastic_line.is_elastic() and by_launcher):
        raise UsageError(
            f"elastic is {text!r}, but no launcher observes the workers; expected a job of `ctl launch "
            f"--workers={text} -- python ...`."
        )
    if parse_worker_range(WORKER_RANGE_VARIABLE, by_launcher) != limits:
        raise UsageError(
            f"elastic is {text!r}, but the launcher was started with --workers={by_launcher}; expected "
            "equal limits. Leave --elastic out: the launcher sets it."
        )
    num_workers = detection.read_topology().num_workers
    if num_workers > 1:
        raise UsageError(
            f"elastic is {text!r}, but the environment lists {num_workers} workers (TF_CONFIG or the "
            "variables of a platform); expected none, because the launcher assigns the ranks. Unset them."
        )
    for name, supported in _SUPPORTED.items():
        value = getattr(config, name)
        if value not in supported:
            expected = " or ".join(repr(choice) for choice in supported)
            raise UsageError(f"{name} is {value!r}; expected {expected} with elastic={text!r}. {_FIX}.")
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        raise UsageError(
            f"elastic is {text!r}, and this worker has {len(gpus)} GPUs; expected none, because gradients "
            "are summed in the memory of the host. Unset --elastic, or set CUDA_VISIBLE_DEVICES=''."
        )
    return limits


class _Task(Protocol):
    """Part of `training.task.Task`."""

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Methods of the user by name, bound to the trainer."""

    @property
    def gradients(self) -> Gradients:
        """Gradient settings."""


def check_run(config: Config, task: _Task, batches: Batches, *, can_roll_back: bool) -> None:
    """Raises UsageError for a trainer or training data that elastic training does not support.

    Args:
      config: Settings of the trainer.
      task: Methods and gradient settings of the trainer.
      batches: Open training data.
      can_roll_back: True if a callback may return to a checkpoint.
    """
    if not is_requested(config):
        return
    received = expected = ""
    methods, gradients = task.methods, task.gradients
    classes = [base.__name__ for method in methods.values() for base in type(_owner_of(method)).__mro__]
    if "train_data_fn" in methods:
        received, expected = "train_data_fn", "train_data, with global batches"
    elif "KerasTrainer" in classes:
        received, expected = "a ctl.KerasTrainer", "a subclass of ctl.Trainer with train_step"
    elif gradients.wire_dtype == "int8":
        received, expected = "wire_dtype='int8'", "None, 'bfloat16' or 'float16'"
    elif can_roll_back or gradients.on_nonfinite == "rollback":
        received, expected = "a rollback to a checkpoint", "on_nonfinite='stop' or 'skip'"
    elif batches.is_per_worker:
        received, expected = "train_data that TensorFlow shards by worker", "global batches"
    elif batches.has_unknown_end:
        received, expected = "train_data of unknown length", "assert_cardinality(n), or repeat()"
    elif batches.mode == "indexed" and batches.steps_per_epoch is None:
        received, expected = "a step without data", "train_data with examples"
    if received:
        raise UsageError(f"elastic training received {received}; expected {expected}. {_FIX}.")


def _owner_of(method: Callable[..., Any]) -> Any:
    return getattr(method, "__self__", None)
