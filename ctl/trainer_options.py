"""Types of the keywords of `ctl.Trainer`, for the constructors of its subclasses."""

from collections.abc import Sequence
from typing import Any

from ctl.callbacks.protocol import Callback
from ctl.callbacks.schedule import Intervals
from ctl.checkpoints.protocol import CheckpointManager
from ctl.config import Config
from ctl.metrics.adapter import MetricWriterLike
from ctl.setting_types import TrainerSettings


class TrainerOptions(TrainerSettings, total=False):
    """Keywords of `ctl.Trainer` except `config`: settings, intervals, checkpoints, writers and callbacks.

    With `Unpack` of `typing` (of `typing_extensions` before Python 3.11), type checkers reject unknown
    keywords and values of other types.

    >>> class Mnist(ctl.Trainer):
    ...     def __init__(
    ...         self,
    ...         config: ctl.Config | None = None,
    ...         *,
    ...         dropout: float = 0.0,
    ...         **options: Unpack[ctl.TrainerOptions],
    ...     ) -> None:
    ...         super().__init__(config, **options)
    """

    intervals: Intervals | None
    checkpoints: CheckpointManager | None
    writers: Sequence[MetricWriterLike | str] | None
    extra_writers: Sequence[MetricWriterLike] | None
    callbacks: Sequence[Callback | Any]


class ConfiguredTrainerOptions(TrainerOptions, total=False):
    """Keywords of `ctl.Trainer` with `config`, for constructors with other positional arguments."""

    config: Config | None
