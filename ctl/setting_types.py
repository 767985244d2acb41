"""Types of the settings of `ctl.Config` as keywords, for type checkers.

Written by generate_setting_types.py; a test compares. Do not edit by hand.
"""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    import tensorflow as tf
    from absl.flags import FlagHolder


class TrainerSettings(TypedDict, total=False):
    """Settings of a trainer, as in docs/flags.md."""

    model_dir: str | PathLike[str] | None
    max_secs: float
    global_batch_size: int
    seed: int
    init_from: str | PathLike[str] | None
    strategy: "str | tf.distribute.Strategy"
    devices: Sequence[str]
    num_virtual_devices: int
    cross_device_ops: str
    communication: str
    sync_every: int
    outer_learning_rate: float
    outer_momentum: float
    collective_timeout_secs: float
    heartbeat_secs: float
    elastic: str | PathLike[str] | None
    tpu: str | PathLike[str] | None
    variable_partitioner: str | PathLike[str] | None
    overfit_batches: int
    max_eval_batches: int
    steps_per_loop: int | str
    log_every_steps: int
    eval_every_steps: int
    save_every_steps: int
    evaluate_ema: bool
    precision: str
    jit_compile: str | bool
    check_collectives: bool
    profile: str | None
    data_position: str
    keep: str | PathLike[str] | None
    background_save: bool
    on_nonfinite: str
    step_timeout_secs: float
    startup_timeout_secs: float
    allow_config_change: bool


class RunSettings(TrainerSettings, total=False):
    """Settings of a trainer and of `ctl.run`, as in docs/flags.md."""

    mode: str
    train_steps: int
    fast_dev_run: bool
    epochs: float
    writers: Sequence[Any] | None
    export: str | PathLike[str] | None
    report_hypertune: str | PathLike[str] | None
    full_traceback: bool


class RunFunction(Protocol):
    """Type of `ctl.run`. Keywords that are no settings are arguments of the trainer, of any type."""

    def __call__(
        self,
        trainer: Callable[..., Any],
        *,
        mode: "FlagHolder[Any] | str" = ...,
        model_dir: "FlagHolder[Any] | str | PathLike[str] | None" = ...,
        train_steps: "FlagHolder[Any] | int" = ...,
        max_secs: "FlagHolder[Any] | float" = ...,
        fast_dev_run: "FlagHolder[Any] | bool" = ...,
        epochs: "FlagHolder[Any] | float" = ...,
        global_batch_size: "FlagHolder[Any] | int" = ...,
        seed: "FlagHolder[Any] | int" = ...,
        init_from: "FlagHolder[Any] | str | PathLike[str] | None" = ...,
        strategy: "FlagHolder[Any] | str | tf.distribute.Strategy" = ...,
        devices: "FlagHolder[Any] | Sequence[str]" = ...,
        num_virtual_devices: "FlagHolder[Any] | int" = ...,
        cross_device_ops: "FlagHolder[Any] | str" = ...,
        communication: "FlagHolder[Any] | str" = ...,
        sync_every: "FlagHolder[Any] | int" = ...,
        outer_learning_rate: "FlagHolder[Any] | float" = ...,
        outer_momentum: "FlagHolder[Any] | float" = ...,
        collective_timeout_secs: "FlagHolder[Any] | float" = ...,
        heartbeat_secs: "FlagHolder[Any] | float" = ...,
        elastic: "FlagHolder[Any] | str | PathLike[str] | None" = ...,
        tpu: "FlagHolder[Any] | str | PathLike[str] | None" = ...,
        variable_partitioner: "FlagHolder[Any] | str | PathLike[str] | None" = ...,
        overfit_batches: "FlagHolder[Any] | int" = ...,
        max_eval_batches: "FlagHolder[Any] | int" = ...,
        steps_per_loop: "FlagHolder[Any] | int | str" = ...,
        log_every_steps: "FlagHolder[Any] | int" = ...,
        eval_every_steps: "FlagHolder[Any] | int" = ...,
        save_every_steps: "FlagHolder[Any] | int" = ...,
        evaluate_ema: "FlagHolder[Any] | bool" = ...,
        precision: "FlagHolder[Any] | str" = ...,
        jit_compile: "FlagHolder[Any] | str | bool" = ...,
        check_collectives: "FlagHolder[Any] | bool" = ...,
        profile: "FlagHolder[Any] | str | None" = ...,
        data_position: "FlagHolder[Any] | str" = ...,
        writers: "FlagHolder[Any] | Sequence[Any] | None" = ...,
        keep: "FlagHolder[Any] | str | PathLike[str] | None" = ...,
        background_save: "FlagHolder[Any] | bool" = ...,
        export: "FlagHolder[Any] | str | PathLike[str] | None" = ...,
        report_hypertune: "FlagHolder[Any] | str | PathLike[str] | None" = ...,
        on_nonfinite: "FlagHolder[Any] | str" = ...,
        step_timeout_secs: "FlagHolder[Any] | float" = ...,
        startup_timeout_secs: "FlagHolder[Any] | float" = ...,
        allow_config_change: "FlagHolder[Any] | bool" = ...,
        full_traceback: "FlagHolder[Any] | bool" = ...,
        **arguments: Any,
    ) -> None:
        """Parses the command line, and runs the program in --mode."""
