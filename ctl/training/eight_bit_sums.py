"""`wire_dtype="int8"`: what a trainer may have with it, and what sums its gradients."""

from ctl.checkpoints.tracked_state import collect, is_model
from ctl.distribute import strategies
from ctl.errors import UsageError
from ctl.step import optimizers
from ctl.step.eight_bit import EightBitSums
from ctl.training import local_training
from ctl.training.trainer_protocol import TrainerProtocol

_INSTEAD = "Write wire_dtype='bfloat16'"


def eight_bit_sums(trainer: TrainerProtocol) -> EightBitSums | None:
    """Made after `build`; None where gradients do not travel so. Raises UsageError where they cannot."""
    if trainer.gradients.wire_dtype != "int8":
        return None
    place, said = trainer.topology, "wire_dtype='int8'"
    if not local_training.is_possible(trainer):
        raise UsageError(
            f"{said} with strategy {strategies.word_of(trainer.strategy)!r} and {place.num_replicas} "
            f"replicas, workers: {place.num_workers}; each worker keeps what rounding leaves out of its "
            f"sums, for one replica. {_INSTEAD}, or --strategy=multi_worker with one device per worker."
        )
    if trainer.config.sync_every > 1:
        raise UsageError(
            f"{said} with sync_every={trainer.config.sync_every}. {_INSTEAD}, or leave one out."
        )
    for name, thing in vars(trainer).items():
        if optimizers.skips_what_is_not_finite(thing):
            raise UsageError(
                f"{said} with self.{name}, a LossScaleOptimizer: what rounding leaves out of a sum has the "
                "scale of its step. Train with the policy 'mixed_bfloat16'."
            )
    if place.num_workers == 1:
        return None
    models = [thing for thing in collect(trainer).values() if is_model(thing)]
    weights = {id(v): v for m in models for v in getattr(m, "trainable_variables", ())}
    return EightBitSums(trainer.strategy, place, list(weights.values()))
