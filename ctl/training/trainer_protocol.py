"""Protocol of the trainer that the parts of a run use. `ctl.Trainer` implements it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf
from ctl.callbacks.schedule import Intervals
from ctl.checkpoints.protocol import CheckpointManager
from ctl.config import Config
from ctl.distribute.topology import Topology
from ctl.metrics.adapter import MetricWriterLike
from ctl.step.gradient_settings import Gradients


class TrainerProtocol(Protocol):
    """Settings, the objects that `build` created, and the methods of the user; see `ctl.Trainer`."""

    config: Config
    model: Any
    optimizer: Any
    step_variable: Any
    strategy: tf.distribute.Strategy
    topology: Topology
    global_batch_size: int
    seed: int
    model_dir: str | None
    log_dir: str | None
    intervals: Intervals
    gradients: Gradients
    callbacks: list[Any]
    hparams: dict[str, Any]
    extra_writers: Sequence[MetricWriterLike]
    init_from: str | None
    evaluate_ema: bool
    jit_compile: str
    check_collectives: bool
    step_timeout_secs: float
    allow_config_change: bool
    data_position: str
    _checkpoints: CheckpointManager | None
    _writers: Sequence[MetricWriterLike] | None
    _rows_may_vary: bool

    @property
    def step(self) -> int: ...
    def build(self) -> None: ...
    def train_data(self, batch_size: int) -> Any: ...
    def eval_data(self, batch_size: int) -> Any: ...
    def train_step(self, batch: Any) -> dict[str, Any]: ...
    def eval_step(self, batch: Any) -> dict[str, Any]: ...
    def after_loop(self, step: int, means: dict[str, float]) -> Any: ...
    def before_training(self, step: int) -> Any: ...
    def after_epoch(self, epoch: int, step: int, means: dict[str, float]) -> Any: ...
    def after_evaluation(self, step: int, means: dict[str, float], metrics: dict[str, Any]) -> Any: ...
    def train_data_fn(self, input_context: Any) -> Any: ...
    def signatures(self) -> Mapping[str, Any]: ...
    def moving_averages(self) -> Iterable[tuple[Any, Any]] | None: ...
    def export(self, *formats: str, directory: str | None = None) -> list[str]: ...
    def evaluate(self) -> Mapping[str, float]: ...
