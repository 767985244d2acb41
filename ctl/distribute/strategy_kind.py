"""Kinds of `tf.distribute` strategies."""

import enum

import tensorflow as tf


class StrategyKind(enum.Enum):
    """Kind of a strategy. The values are those of the setting `strategy`."""

    DEFAULT = "default"
    ONE_DEVICE = "one_device"
    MIRRORED = "mirrored"
    MULTI_WORKER = "multi_worker"
    PARAMETER_SERVER = "parameter_server"
    CENTRAL_STORAGE = "central_storage"
    TPU = "tpu"
    OTHER = ""


def kind_of(strategy: tf.distribute.Strategy) -> StrategyKind:
    """Returns the kind of a strategy, OTHER for a class that no setting creates."""
    classes = tf.distribute
    kinds = {
        classes.MultiWorkerMirroredStrategy: StrategyKind.MULTI_WORKER,
        classes.MirroredStrategy: StrategyKind.MIRRORED,
        classes.OneDeviceStrategy: StrategyKind.ONE_DEVICE,
        classes.experimental.CentralStorageStrategy: StrategyKind.CENTRAL_STORAGE,
        classes.TPUStrategy: StrategyKind.TPU,
        classes.ParameterServerStrategy: StrategyKind.PARAMETER_SERVER,
    }
    for strategy_class, strategy_kind in kinds.items():
        if isinstance(strategy, strategy_class):
            return strategy_kind
    is_default = type(strategy).__name__ == "_DefaultDistributionStrategy"
    return StrategyKind.DEFAULT if is_default else StrategyKind.OTHER


def strategy_name(strategy: tf.distribute.Strategy) -> str:
    """Returns the name of a strategy for users: its setting, or its class."""
    return kind_of(strategy).value or type(strategy).__name__


def has_parameter_servers(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if parameter servers hold the variables, and workers compute steps asynchronously."""
    return kind_of(strategy) is StrategyKind.PARAMETER_SERVER
