"""Training and evaluation data of a trainer, opened at the position of its session."""

from typing import Any

from ctl import config
from ctl.checkpoints.protocol import NullCheckpoints
from ctl.data import per_worker, pipeline, row_windows
from ctl.data.batches import Batches
from ctl.data.parts import open_parts
from ctl.distribute import parameter_servers, strategies
from ctl.errors import UsageError
from ctl.training.optional_methods import is_defined_by_user
from ctl.training.session import Session
from ctl.training.trainer_protocol import TrainerProtocol


def open_train_batches(
    trainer: TrainerProtocol, session: Session, steps: int | None, epochs: float | None
) -> tuple[int | None, Batches]:
    """Opens the training data at the position of the session.

    Args:
      trainer: Trainer to train.
      session: State of the trainer.
      steps: Total number of steps, or None.
      epochs: Total number of passes over the data, or None.

    Returns:
      The last step (None: until the data ends), and the batches.

    Raises:
      UsageError: If the number of steps or epochs is invalid, or both are None and the data is endless.
    """
    if steps is not None:
        config.whole("steps", steps, 1)
    if steps is not None and epochs is not None:
        raise UsageError(f"got steps={steps} and epochs={epochs}; expected one of them.")
    if epochs is not None and not (isinstance(epochs, (int, float)) and 0 < epochs < float("inf")):
        raise UsageError(f"epochs is {epochs!r}; expected a number > 0.")
    session.advance(session.step, trainer.global_batch_size)
    batches = _open_batches(trainer, session, steps, epochs)
    remaining = batches.passes.remaining_steps if batches.passes else batches.steps
    if remaining is None:
        if steps is None and not batches.has_unknown_end:
            raise UsageError(
                "train_data is endless and no number of steps was given. Write train(steps=...), or "
                "--train_steps."
            )
        return steps, batches
    end = session.step + remaining
    return (end if steps is None else min(steps, end)), batches


def _open_batches(
    trainer: TrainerProtocol, session: Session, steps: int | None, epochs: float | None
) -> Batches:
    where: dict[str, Any] = {"global_batch_size": trainer.global_batch_size, "seed": trainer.seed}
    parts = trainer.train_data_fn if is_defined_by_user(trainer, "train_data_fn") else None
    served = parameter_servers.is_used(trainer.strategy)
    if session.position is not None and (served or parts is not None):
        raise UsageError(
            "data_position is 'iterator', which saves one iterator of global batches; "
            f"{'parameter servers' if served else 'train_data_fn'} have no such. Leave it out."
        )
    compiled = config.jit_compile(trainer.jit_compile) == "loop"
    if compiled and parts is not None:
        row_windows.raise_not_in_memory("a pipeline per worker (train_data_fn)")
    if served:
        if parts is not None:
            raise UsageError(
                "train_data_fn gives each worker's part of batches in step, and workers of parameter "
                "servers go at their own speed. Write train_data, with global batches."
            )
        return per_worker.open_train_per_worker(
            trainer.train_data,
            trainer.strategy,
            start_examples=session.progress.examples,
            epochs=epochs,
            steps=steps,
            **where,
        )
    if parts is not None:
        return open_parts(
            parts,
            trainer.strategy,
            trainer.topology,
            step=session.step,
            epochs=epochs,
            sum_over_workers=session.agreement.sum,
            **where,
        )
    return pipeline.open_train_data(
        trainer.train_data,
        trainer.strategy,
        trainer.topology,
        start_examples=session.progress.examples,
        epochs=epochs,
        mode=trainer.data_position,
        position=session.position,
        resumable=not isinstance(session.manager, NullCheckpoints),
        batches_per_pass=session.progress.pass_batches,
        rows_may_vary=trainer._rows_may_vary,
        indexed=compiled,
        **where,
    )


def open_eval_batches(trainer: TrainerProtocol, session: Session) -> Batches:
    """Opens one pass over the evaluation data. The first call checks the data."""
    batches = pipeline.open_eval_data(
        trainer.eval_data,
        strategies.local(trainer.strategy),
        trainer.topology,
        global_batch_size=trainer.global_batch_size,
        is_checked=session.has_checked_eval_data,
    )
    session.record_eval_data()
    return batches
