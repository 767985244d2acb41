"""Reduction of the values of Keras 3 loss objects.

Purpose: A loss object returns the mean over the examples of one replica, divided by the number of replicas.
  `ctl.step.keras_losses` raises an error, or computes the share of the mean over the global batch.
Replaces: `reduce_weighted_values`, `scale_loss_for_distribution` and `unscale_loss_for_distribution` in
  `keras.src.losses.loss`; calls `squeeze_or_expand_to_same_rank` of that module.
Versions: Keras 3.0 and later; functions that do not exist are skipped.
Upstream issue: none known.
Switch: `loss_reduction`. Without the patch Keras reduces losses. On several replicas this is the right mean
  only if all replicas have equal numbers of examples.
"""

import functools
import sys
from typing import Any, Protocol

from ctl.tensorflow_patches import switches

MODULE = "keras.src.losses.loss"


class LossReduction(Protocol):
    """Replacements; each gets the original function of Keras as its first argument."""

    def reduce(
        self,
        original: Any,
        same_rank: Any,
        values: Any,
        sample_weight: Any,
        mask: Any,
        reduction: Any,
        dtype: Any,
    ) -> Any:
        """Replaces `reduce_weighted_values`."""

    def scale(self, original: Any, value: Any) -> Any:
        """Replaces `scale_loss_for_distribution`."""

    def unscale(self, original: Any, value: Any) -> Any:
        """Replaces `unscale_loss_for_distribution`."""


def replace_loss_reduction(replacement: LossReduction) -> None:
    """Installs the replacements; idempotent. A no-op if Keras 3 is not imported."""
    module: Any = sys.modules.get(MODULE)
    if module is None or hasattr(module.reduce_weighted_values, "__wrapped__"):
        return
    if not switches.is_enabled("loss_reduction"):
        return
    reduce = module.reduce_weighted_values

    @functools.wraps(reduce)
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        same_rank = module.squeeze_or_expand_to_same_rank
        return replacement.reduce(reduce, same_rank, values, sample_weight, mask, reduction, dtype)

    module.reduce_weighted_values = reduce_weighted_values
    unscale = getattr(module, "unscale_loss_for_distribution", None)
    if unscale is not None:
        module.unscale_loss_for_distribution = functools.partial(replacement.unscale, unscale)
        scale = module.scale_loss_for_distribution
        module.scale_loss_for_distribution = functools.partial(replacement.scale, scale)
