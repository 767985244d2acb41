"""Are loss and gradients finite? Replicas agree before the update, in the sum they make anyway.

stop      the graph stops at that step, on every replica alike
skip      the step is left out: no update, no change of statistics, none of its numbers count
rollback  as skip; after the loop the run goes back to its newest checkpoint, past those data
"""

import re
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError

NONFINITE_POLICIES = ("stop", "skip", "rollback")
MESSAGE = "loss or gradient is not finite"
AT_AVERAGE = f"{MESSAGE} since the last average"  # of weights, which ends steps of a worker's own
SKIPPED = "skipped_steps"  # the name under which steps that were left out are counted
LEFT_OUT, STOPPED = 1.0, 2.0  # what a report says of a step
_FLAGS = re.compile(r"\[(\d+(?: \d+)*)\] \[(\d+(?: \d+)*)\]")


def check_policy(policy: str) -> None:
    """Raises UsageError for another word than those of `POLICIES`."""
    if policy not in NONFINITE_POLICIES:
        raise UsageError(f"on_nonfinite is {policy!r}; expected one of {', '.join(NONFINITE_POLICIES)}.")


def flag_of(loss: tf.Tensor) -> tf.Tensor:
    """`[]` float32: 1 where this replica's share of the loss is NaN or infinite, else 0."""
    return 1.0 - tf.cast(tf.math.is_finite(loss), tf.float32)


def suspects(gradients: list, loss_flag: tf.Tensor, replica: tf.Tensor, num_replicas: int) -> tf.Tensor:
    """Returns `[2 * num_replicas]` float32 flags of losses and gradients, to be summed over replicas."""
    sums = [tf.reduce_sum(_float(getattr(g, "values", g))) for g in gradients]
    gradient_flag = flag_of(tf.add_n(sums) if len(sums) > 1 else sums[0])
    place = tf.one_hot(replica, num_replicas)
    return tf.concat([place * loss_flag, place * gradient_flag], axis=0)


def _float(values: Any) -> Any:
    return tf.cast(values, tf.float32)


def alone(loss_flag: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
    """The same for the only replica."""
    return tf.stack([loss_flag, flag_of(norm)])


def good(norm: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
    """`[]` bool, equal on every replica."""
    return tf.math.is_finite(norm) & (tf.reduce_sum(found) <= 0.0)


def stop_unless(holds: tf.Tensor, found: tf.Tensor, message: str = MESSAGE) -> tf.Operation:
    """An operation that fails, naming the suspects, where `holds` is false."""
    loss, gradient = tf.split(tf.cast(found, tf.int32), 2)
    return tf.raw_ops.Assert(condition=holds, data=[message, loss, gradient], summarize=10_000)


def warn_of_skipped(holds: tf.Tensor, found: tf.Tensor, step: tf.Tensor, local: bool = False) -> None:
    """Prints, from the graph of the first replica, that the step after `step` is left out.

    `local`: from each replica; the step is its own.
    """
    context = tf.distribute.get_replica_context()
    elsewhere = tf.constant(False) if local else tf.not_equal(context.replica_id_in_sync_group, 0)
    loss, gradient = tf.split(tf.cast(found, tf.int32), 2)
    words = (
        "ctl: step",
        step + 1,
        "is left out:",
        MESSAGE,
        "(flags by replica: loss",
        loss,
        "gradient",
        gradient,
        ")",
    )
    tf.cond(holds | elsewhere, tf.no_op, lambda: tf.print(*words, output_stream=sys.stderr))


def step_report(left_out: Sequence[tuple], stops: Sequence[tuple]) -> tf.Tensor:
    """`[3]` float32 on what became of a step where nothing can be printed or raised, within XLA.

    0, LEFT_OUT or STOPPED, and two flags: is the loss at fault, is the gradient. Both arguments are
    pairs of an update: whether it is fine, and `alone`.
    """
    outcome, flags = tf.constant(0.0), tf.zeros([2])
    for meaning, pairs in ((LEFT_OUT, left_out), (STOPPED, stops)):
        for good, found in pairs:
            bad = tf.cast(tf.logical_not(good), tf.float32)
            outcome, flags = tf.maximum(outcome, bad * meaning), tf.maximum(flags, bad * found)
    return tf.concat([outcome[None], flags], axis=0)


def reported_error(flags: Sequence[float]) -> tf.errors.InvalidArgumentError:
    """The error of `stop_unless`, made of a report's two flags."""
    loss, gradient = (int(f) for f in flags)
    return tf.errors.InvalidArgumentError(None, None, f"{MESSAGE} [{loss}] [{gradient}]")


def warn_of_reported(step: int, flags: Sequence[float]) -> None:
    """The line of `warn_of_skipped`, made of a report's two flags; `step`: the one that is left out."""
    loss, gradient = (int(f) for f in flags)
    words = f"{MESSAGE} (flags by replica: loss [{loss}] gradient [{gradient}] )"
    print(f"ctl: step {step} is left out: {words}", file=sys.stderr)


def described(error_text: str, num_replicas: int, num_workers: int) -> str:
    """What an error of `stop_unless` says: "the loss on replica 1 (worker 1)"."""
    match = _FLAGS.search(error_text)
    if match is None:
        return "the loss or the gradient is NaN or infinite"
    found = []
    for what, flags in zip(("the loss", "the gradient"), match.groups(), strict=True):
        bad = [r for r, flag in enumerate(flags.split()) if flag != "0"]
        if not bad:
            continue
        if num_replicas == 1:
            found.append(what)
        else:
            places = [
                f"{r} (worker {r * num_workers // num_replicas})" if num_workers > 1 else str(r)
                for r in bad
            ]
            found.append(f"{what} on replica {', '.join(places)}")
    verb = "are" if len(found) > 1 else "is"
    return f"{' and '.join(found) or 'the sum of the gradients'} {verb} NaN or infinite"
