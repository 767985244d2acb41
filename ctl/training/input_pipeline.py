"""Training and evaluation data of a trainer, opened at its position."""

from collections.abc import Callable
from typing import Any

from ctl import setting_values
from ctl.data import eval_sets, limits, pipeline, row_windows
from ctl.data.batches import Batches
from ctl.data.parts import open_parts
from ctl.errors import UsageError
from ctl.parameter_server.worker_data import open_train_per_worker
from ctl.training.prepared import PreparedTrainer


def open_train_batches(
    prepared: PreparedTrainer, steps: int | None, epochs: float | None
) -> tuple[int | None, Batches]:
    """Opens the training data at the position of the trainer.

    Args:
      prepared: Trainer to train.
      steps: Total number of steps, or None.
      epochs: Total number of passes over the data, or None.

    Returns:
      The last step (None: until the data ends), and the batches.

    Raises:
      UsageError: If the number of steps or epochs is invalid, or both are None and the data is endless.
    """
    if steps is not None:
        setting_values.check_integer("steps", steps, 1)
    if steps is not None and epochs is not None:
        raise UsageError(f"got steps={steps} and epochs={epochs}; expected one of them.")
    if epochs is not None and not (isinstance(epochs, (int, float)) and 0 < epochs < float("inf")):
        raise UsageError(f"epochs is {epochs!r}; expected a number > 0.")
    prepared.checkpointing.advance(prepared.step)
    batches = _open_batches(prepared, steps, epochs)
    remaining = batches.passes.remaining_steps if batches.passes else batches.steps
    if remaining is None:
        if steps is None and not batches.has_unknown_end:
            raise UsageError(
                "train_data is endless and no number of steps was given. Write train(steps=...), or "
                "--train_steps."
            )
        return steps, batches
    end = prepared.step + remaining
    return (end if steps is None else min(steps, end)), batches


def _open_batches(prepared: PreparedTrainer, steps: int | None, epochs: float | None) -> Batches:
    settings, world, checkpointing = prepared.config, prepared.world, prepared.checkpointing
    progress, methods = checkpointing.progress, prepared.task.methods
    arguments: dict[str, Any] = {"global_batch_size": settings.global_batch_size, "seed": settings.seed}
    parts, num_batches = methods.get("train_data_fn"), settings.overfit_batches
    if num_batches and epochs is None and steps is not None:
        epochs = float(steps)  # of one step or more each; `steps` ends the run
    if parts is not None:
        parts = limits.limit_worker_batches(parts, num_batches, world.topology.num_local_replicas)
    if checkpointing.position is not None and (world.is_asynchronous or parts is not None):
        raise UsageError(
            "data_position is 'iterator', which saves one iterator of global batches, but there is none "
            f"with {'parameter servers' if world.is_asynchronous else 'train_data_fn'}. Leave it out."
        )
    is_compiled = settings.jit_compile == "loop"
    if is_compiled and parts is not None:
        row_windows.raise_not_in_memory("a pipeline per worker (train_data_fn)")
    if parts is None:
        train_data = limits.limit_batches(methods["train_data"], num_batches, "train_data")
    if world.is_asynchronous:
        if parts is not None:
            raise UsageError(
                "train_data_fn returns each worker's part of a synchronous batch, and workers of parameter "
                "servers are asynchronous. Write train_data, with global batches."
            )
        return open_train_per_worker(
            train_data,
            world.strategy,
            start_examples=progress.examples,
            epochs=epochs,
            steps=steps,
            **arguments,
        )
    if parts is not None:
        return open_parts(
            parts,
            world.strategy,
            world.topology,
            step=prepared.step,
            epochs=epochs,
            sum_over_workers=world.host_all_reduce.sum,
            **arguments,
        )
    return pipeline.open_train_data(
        train_data,
        world.strategy,
        world.topology,
        start_examples=progress.examples,
        epochs=epochs,
        mode=settings.data_position,
        position=checkpointing.position,
        resumable=checkpointing.can_save,
        batches_per_pass=progress.pass_batches,
        rows_may_vary=prepared.task.rows_may_vary,
        indexed=is_compiled,
        iterator_state=progress.iterator_state,
        **arguments,
    )


def open_eval_sets(prepared: PreparedTrainer) -> dict[str, Callable[[], Batches]]:
    """Calls `eval_data`. Returns a function for each evaluation set, which opens one pass over it.

    The data are checked unless an earlier call of `Activity.record_eval_data` has recorded the checks.
    """
    config, world = prepared.config, prepared.world

    def opener(name: str, eval_data: Callable[[int], Any]) -> Callable[[], Batches]:
        source = eval_sets.data_name(name)
        return lambda: pipeline.open_eval_data(
            limits.limit_batches(eval_data, config.max_eval_batches, source, is_repeated=False),
            world.local_strategy,
            world.topology,
            global_batch_size=config.global_batch_size,
            is_checked=prepared.activity.has_checked_eval_data,
            name=source,
        )

    sets = eval_sets.split_sets(prepared.task.methods["eval_data"], config.global_batch_size)
    return {name: opener(name, eval_data) for name, eval_data in sets.items()}
