"""Policies for values that are not finite. Replicas agree on them within the sum of the gradients.

stop      The graph raises an error at that step, on every replica.
skip      The step is left out: no update, no change of statistics, and its values do not count.
rollback  As skip. After the loop the run restores its newest checkpoint and continues with later data.
"""

import re
import sys
from collections.abc import Sequence

import tensorflow as tf

NONFINITE_POLICIES = ("stop", "skip", "rollback")
MESSAGE = "loss or gradient is not finite"
AT_AVERAGE = f"{MESSAGE} since the last average"  # of weights, at which local SGD ends a run
SKIPPED = "skipped_steps"  # name of the number of steps that were left out
LEFT_OUT, STOPPED = 1.0, 2.0  # outcomes in a report of a step
_FLAGS = re.compile(r"\[(\d+(?: \d+)*)\] \[(\d+(?: \d+)*)\]")


def flag_of(loss: tf.Tensor) -> tf.Tensor:
    """Returns `[]` float32: 1 where the loss of this replica is NaN or infinite, else 0."""
    return 1.0 - tf.cast(tf.math.is_finite(loss), tf.float32)


def suspects(gradients: list, loss_flag: tf.Tensor, replica: tf.Tensor, num_replicas: int) -> tf.Tensor:
    """Returns `[2 * num_replicas]` float32 flags to be summed over replicas: of losses, of gradients."""
    sums = [tf.reduce_sum(tf.cast(getattr(g, "values", g), tf.float32)) for g in gradients]
    gradient_flag = flag_of(tf.add_n(sums)) if sums else 0.0
    position = tf.one_hot(replica, num_replicas)
    return tf.concat([position * loss_flag, position * gradient_flag], axis=0)


def suspects_of_only_replica(loss_flag: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
    """Returns the flags `[2]` of a single replica: of its loss, and of its gradients, from their norm."""
    return tf.stack([loss_flag, flag_of(norm)])


def is_finite(norm: tf.Tensor, flags: tf.Tensor) -> tf.Tensor:
    """Returns `[]` bool, equal on every replica: True if all losses and gradients are finite."""
    return tf.math.is_finite(norm) & (tf.reduce_sum(flags) <= 0.0)


def stop_unless(condition: tf.Tensor, flags: tf.Tensor, message: str = MESSAGE) -> tf.Operation:
    """Returns an operation that raises an error with the flags where `condition` is False."""
    loss, gradient = tf.split(tf.cast(flags, tf.int32), 2)
    return tf.raw_ops.Assert(condition=condition, data=[message, loss, gradient], summarize=10_000)


def warn_of_skipped(is_valid: tf.Tensor, flags: tf.Tensor, step: tf.Tensor, is_local: bool = False) -> None:
    """Prints from the graph that the step after `step` is left out.

    Args:
      is_valid: `[]` bool, True where the step counts and the warning is not printed.
      flags: Flags of `suspects`.
      step: Number of completed steps.
      is_local: True if workers train independently. Each replica prints then, else the first one only.
    """
    context = tf.distribute.get_replica_context()
    is_silent = tf.constant(False) if is_local else tf.not_equal(context.replica_id_in_sync_group, 0)
    loss, gradient = tf.split(tf.cast(flags, tf.int32), 2)
    reason = f"is skipped: {MESSAGE} (flags by replica: loss"
    parts = ("ctl: step", step + 1, reason, loss, "gradient", gradient, ")")
    tf.cond(is_valid | is_silent, tf.no_op, lambda: tf.print(*parts, output_stream=sys.stderr))


def step_report(validity: Sequence[tuple], stop_conditions: Sequence[tuple]) -> tf.Tensor:
    """Returns the report `[3]` float32 of a step within XLA, where no operation can print or raise.

    Args:
      validity: Pairs (is_valid, flags) of the updates of the step.
      stop_conditions: Pairs (may_continue, flags) of the updates of the step.

    Returns:
      The outcome (0, LEFT_OUT or STOPPED), the flag of the loss, and the flag of the gradient.
    """
    outcome, flags = tf.constant(0.0), tf.zeros([2])
    for meaning, pairs in ((LEFT_OUT, validity), (STOPPED, stop_conditions)):
        for condition, suspect_flags in pairs:
            failed = tf.cast(tf.logical_not(condition), tf.float32)
            outcome = tf.maximum(outcome, failed * meaning)
            flags = tf.maximum(flags, failed * suspect_flags)
    return tf.concat([outcome[None], flags], axis=0)


def reported_error(flags: Sequence[float]) -> tf.errors.InvalidArgumentError:
    """Returns the error of `stop_unless` for the two flags of a report."""
    loss, gradient = (int(f) for f in flags)
    return tf.errors.InvalidArgumentError(None, None, f"{MESSAGE} [{loss}] [{gradient}]")


def warn_of_reported(step: int, flags: Sequence[float]) -> None:
    """Prints the line of `warn_of_skipped` for the two flags of a report; `step` is the skipped one."""
    loss, gradient = (int(f) for f in flags)
    reason = f"{MESSAGE} (flags by replica: loss [{loss}] gradient [{gradient}] )"
    print(f"ctl: step {step} is skipped: {reason}", file=sys.stderr)


def described(error_text: str, num_replicas: int, num_workers: int) -> str:
    """Returns a description of an error of `stop_unless`: "the loss on replica 1 (worker 1) is NaN ..."."""
    match = _FLAGS.search(error_text)
    if match is None:
        return "the loss or the gradient is NaN or infinite"
    subjects = []
    for subject, flags in zip(("the loss", "the gradient"), match.groups(), strict=True):
        replicas = [r for r, flag in enumerate(flags.split()) if flag != "0"]
        if not replicas:
            continue
        if num_replicas == 1:
            subjects.append(subject)
        else:
            labels = [
                f"{r} (worker {r * num_workers // num_replicas})" if num_workers > 1 else str(r)
                for r in replicas
            ]
            subjects.append(f"{subject} on replica {', '.join(labels)}")
    verb = "are" if len(subjects) > 1 else "is"
    return f"{' and '.join(subjects) or 'the sum of the gradients'} {verb} NaN or infinite"
