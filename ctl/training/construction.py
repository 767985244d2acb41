"""Creation of the strategy, the intervals and the checkpoint manager of a trainer from its settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from ctl.callbacks.schedule import Every, Intervals
from ctl.checkpoints.chief_only import ChiefOnlyCheckpoints
from ctl.checkpoints.protocol import CheckpointManager
from ctl.checkpoints.retention import Keep
from ctl.config import Config
from ctl.distribute import strategies
from ctl.distribute.topology import Topology
from ctl.elastic import membership, requirements
from ctl.errors import UsageError
from ctl.metrics.adapter import MetricWriterLike
from ctl.setting_values import are_names, check_type
from ctl.step.reducers.local_sgd import check_outer_optimizer
from ctl.trackers.registry import check_writer_names

_MAY_DIFFER = ("model_dir", "strategy")  # between workers that are not started with flags
_SETTING_BY_FIELD = {  # of Intervals
    "steps_per_loop": "steps_per_loop",
    "log": "log_every_steps",
    "save": "save_every_steps",
    "evaluate": "eval_every_steps",
}


def strategy_of(
    config: Config, flags: Mapping[str, Any] | None = None, topology: Topology | None = None
) -> tf.distribute.Strategy:
    """Returns the strategy. Creating one by name blocks until all workers have connected.

    Args:
      config: Settings of the trainer.
      flags: Values that must be equal on all workers. Defaults to the settings.
      topology: Topology of the job. Defaults to that of the environment.
    """
    check_outer_optimizer(config)
    check_writer_names(config.writers, config.model_dir)
    if not isinstance(config.strategy, str):
        return membership.checked_strategy(config.strategy, config)
    if flags is None:
        flags = {n: v for n, v in dataclasses.asdict(config).items() if n not in _MAY_DIFFER}
    if requirements.is_requested(config):
        return membership.create_strategy(config, flags)
    return strategies.make_strategy(
        config.strategy,
        devices=config.devices,
        num_virtual_devices=config.num_virtual_devices,
        cross_device_ops=config.cross_device_ops,
        communication=config.communication,
        timeout_secs=config.collective_timeout_secs,
        heartbeat_secs=config.heartbeat_secs,
        tpu=config.tpu,
        variable_partitioner=config.variable_partitioner,
        flags=flags,
        startup_timeout_secs=config.startup_timeout_secs or None,
        topology=topology,
    )


def intervals_of(config: Config, intervals: Intervals | None = None) -> Intervals:
    """Returns the intervals of the settings. Explicitly given settings replace those of `intervals`."""
    fields: dict[str, Any] = {
        "steps_per_loop": config.steps_per_loop,
        "log": Every(steps=config.log_every_steps),
        "save": Every(steps=config.save_every_steps),
        "evaluate": Every(steps=config.eval_every_steps),
    }
    check_type("intervals", intervals, Intervals | None)
    if intervals is None:
        return Intervals(**fields)
    explicit = [field for field, setting in _SETTING_BY_FIELD.items() if setting in config.explicit_names]
    return dataclasses.replace(intervals, **{field: fields[field] for field in explicit})


def checkpoints_of(config: Config) -> CheckpointManager | None:
    """`model_dir/checkpoints`; None without a model_dir."""
    keep = Keep.parse(config.keep)
    if not config.model_dir:
        return None
    where = f"{config.model_dir}/checkpoints"
    return ChiefOnlyCheckpoints(where, keep=keep, background=config.background_save)


def with_writer_names(settings: Mapping[str, Any], writers: Any) -> dict[str, Any]:
    """Returns the settings, with `writers` if it is a list of names and not of metric writers."""
    has_names = writers is not None and are_names(writers)
    return {**settings, "writers": writers} if has_names else dict(settings)


def writers_of(
    config: Config, writers: Sequence[MetricWriterLike | str] | None
) -> Sequence[MetricWriterLike | str] | None:
    """Returns the metric writers of the constructor, or the names in the settings. None: the default."""
    if writers is not None and not are_names(writers):
        return writers
    return config.writers if "writers" in config.explicit_names else None


_CREATED_BY_INIT = (
    *("config", "topology", "strategy", "gradients", "global_batch_size", "seed", "hparams", "model_dir"),
    "_prepared_trainer",
)


def name_forgotten_init(trainer_class: type) -> None:
    """Makes subclasses raise UsageError if their `__init__` does not call the one of the class."""
    for name in _CREATED_BY_INIT:
        setattr(trainer_class, name, _CreatedByInit(name))


class _CreatedByInit:
    """Placeholder on the class for an attribute that `__init__` creates."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        raise UsageError(
            f"{owner.__name__}.__init__ has not called super().__init__(**options), which sets "
            f"{self._name.lstrip('_')!r} and other attributes. Call it first."
        )
