"""Implementation of `Trainer.predict`."""

from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data import dataset_checks, input_errors, sources
from ctl.data.indexed import IndexedData
from ctl.distribute.row_partition import share
from ctl.distribute.world import World
from ctl.errors import UsageError
from ctl.training.prepared import PreparedTrainer


def run_prediction(prepared: PreparedTrainer, model: Any, data: Any) -> Any:
    """Returns the outputs of a model of a prepared trainer for all of `data`."""
    if not callable(model):
        raise UsageError(
            f"predict() calls self.model, which is {model!r}. Set it in build(), or write predict(self)."
        )
    source = sources.as_dataset(data, "predict's data", prepared.config.global_batch_size, shuffle=False)
    if isinstance(source, IndexedData):
        ordered, total = source.in_order(), source.num_examples
        source = ordered.replica_batches(seed=0, start=0, total=total, replicas=range(1), num_replicas=1)
    elif isinstance(source, tf.data.Dataset):
        dataset_checks.check_dataset(source, "predict's data", None)
        if source.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise UsageError("predict's data is endless; expected one pass over it. Write data.take(n).")
    else:
        raise UsageError(
            "predict() got ctl.example_numbers(...); expected arrays, or a tf.data.Dataset of batches."
        )
    call = prepared.programs.predict_function(
        model, lambda: tf.function(_call_of(model), reduce_retracing=True)
    )
    try:
        outputs = [_outputs(prepared.world, call, batch) for batch in source]
    except tf.errors.OpError as e:
        raise input_errors.explain_input_error(e, "predict's data") or e  # noqa: B904  has e as context
    if not outputs:
        raise UsageError("predict's data ended before its first batch; expected at least one.")
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *outputs)


def _call_of(model: Any) -> Any:
    """Returns a function that calls the model on the inputs of a batch."""

    def call(batch: Any) -> Any:
        inputs = batch[0] if isinstance(batch, tuple) else batch
        return model.predict_step((inputs,)) if hasattr(model, "predict_step") else model(inputs)

    return call


def _outputs(world: World, call: Any, batch: Any) -> Any:
    """Returns arrays `[b, ...]` for one batch. The replicas of this process share its rows."""
    local = world.topology.num_local_replicas
    if local == 1:
        return tf.nest.map_structure(np.asarray, call(batch))
    strategy = world.local_strategy
    shares = [share(batch, replica, local, counted=True) for replica in range(local)]
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: shares[context.replica_id_in_sync_group % local].rows
    )
    result = strategy.run(call, (rows,))

    def joined(leaf: Any) -> np.ndarray:
        parts = strategy.experimental_local_results(leaf)
        return np.concatenate([p.numpy()[: int(s.real_rows)] for p, s in zip(parts, shares, strict=True)])

    return tf.nest.map_structure(joined, result)
