"""Gradient tapes that return the reduced gradients of all ranks: `hvd.DistributedGradientTape`.

with tf.GradientTape() as tape:
    loss = loss_of(model(images), labels)
tape = hvd.DistributedGradientTape(tape)
gradients = tape.gradient(loss, model.trainable_variables)
"""

from typing import Any

import tensorflow as tf
from ctl.errors import UsageError
from ctl.hvd import arguments
from ctl.hvd.compression import Compression
from ctl.hvd.optimizers import layer_variables, select_groups
from ctl.hvd.process_sets import ProcessSet, global_process_set
from ctl.hvd.reducing import Reduction, variable_key
from ctl.tensorflow_patches import gradient_tape

_do_not_convert = tf.autograph.experimental.do_not_convert


class Exchanging:
    """Mixin for gradient tapes. It precedes the class of the tape in a common subclass."""

    _hvd_reduction: Reduction
    _hvd_local: set[Any]

    def register_local_source(self, source: Any) -> None:
        """Keeps the gradient of `source` on this rank, for a layer that other ranks do not have."""
        self._hvd_local.add(variable_key(source))

    @_do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: Any = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Returns the reduced gradients of `target`, in the structure of `sources`. Collective.

        `use_generic_names` omits the class of the tape from the names of the exchanges, for ranks with
        different programs.
        """
        local_gradients = super().gradient(  # type: ignore[misc]
            target, sources, output_gradients=output_gradients, unconnected_gradients=unconnected_gradients
        )
        flat_sources = tf.nest.flatten(sources)
        reduced = self._hvd_reduction(
            tf.nest.flatten(local_gradients), flat_sources, self._hvd_local, use_generic_names
        )
        return tf.nest.pack_sequence_as(sources, reduced)

    @_do_not_convert
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: Any = False
    ) -> Any:
        """Returns ([(local source, gradient), ...], [(other source, gradient), ...]). Collective."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [(s, g) for s, g in pairs if variable_key(s) in self._hvd_local]
        return local, [(s, g) for s, g in pairs if variable_key(s) not in self._hvd_local]


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = arguments.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a copy of the tape and its records. Its method `gradient` returns reduced gradients.

    An optimizer that applies these gradients must not be distributed.

    Args:
      gradtape: Gradient tape that has recorded the loss.
      device_dense: Ignored.
      device_sparse: Ignored.
      compression: Compression of dense gradients that are sent through a network.
      sparse_as_dense: If True, converts tf.IndexedSlices to tensors before the exchange.
      op: Average, Sum, Min, Max or Product.
      gradient_predivide_factor: An average is divided by it before, and multiplied after, the sum.
      num_groups: Deprecated name of `groups`.
      groups: Number of exchanges, or lists of variables per exchange. Default: as few exchanges as
        HOROVOD_FUSION_THRESHOLD (bytes per exchange) allows.
      process_set: Ranks of the exchange. Other ranks get their own gradients.
      scale_local_gradients: If True, divides gradients of `register_local_source` by the number of ranks.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise UsageError(
            f"DistributedGradientTape got {gradtape!r:.80}; expected the tf.GradientTape of the loss."
        )
    reduction = Reduction(
        name="DistributedGradientTape",
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        predivide=gradient_predivide_factor,
        groups=select_groups(num_groups, groups),
        process_set=process_set,
        device_dense=device_dense,
        device_sparse=device_sparse,
        scales_local=scale_local_gradients,
    )
    base = type(gradtape)
    tape_class = type(base.__name__, (Exchanging, base), {"__doc__": base.__doc__})
    return gradient_tape.copy_tape(gradtape, tape_class, _hvd_reduction=reduction, _hvd_local=set())


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = arguments.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a `DistributedGradientTape` that does not exchange the gradients of some layers.

    Args:
      gradtape: Gradient tape that has recorded the loss.
      device_dense: Ignored.
      device_sparse: Ignored.
      compression: Compression of dense gradients that are sent through a network.
      sparse_as_dense: If True, converts tf.IndexedSlices to tensors before the exchange.
      op: Average, Sum, Min, Max or Product.
      gradient_predivide_factor: An average is divided by it before, and multiplied after, the sum.
      num_groups: Deprecated name of `groups`.
      groups: Number of exchanges, or lists of variables per exchange. Default: as few exchanges as
        HOROVOD_FUSION_THRESHOLD (bytes per exchange) allows.
      process_set: Ranks of the exchange. Other ranks get their own gradients.
      local_layers: One layer, or several layers, that only this rank has.
      scale_local_gradients: If True, divides gradients of these layers by the number of ranks.
    """
    local_variables = layer_variables(local_layers)
    distributed_tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in local_variables:
        distributed_tape.register_local_source(variable)
    return distributed_tape
