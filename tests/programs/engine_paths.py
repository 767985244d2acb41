"""Comparison of sums over TensorFlow's ring and the engine on two workers; argv[1] is for checkpoints."""

import json
import logging
import sys
from pathlib import Path

import ctl
import keras
import numpy as np
import tensorflow as tf
from ctl.collectives.errors import HorovodInternalError
from ctl.distribute import communication_choice, engine_all_reduce
from ctl.distribute.engine_all_reduce import PeerLimits, engine_of, install_engine
from small_models import Small, every_step

STRATEGY = ctl.make_strategy("multi_worker", communication="tcp")
ENGINE = engine_of(STRATEGY)
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def run_all_collectives() -> list:
    """Returns the results of all collectives of the strategy."""
    rank = STRATEGY.cluster_resolver.task_id
    random = np.random.default_rng(rank)

    def numbers(*shape, dtype=np.float32):
        return tf.identity(tf.constant(random.normal(size=shape) * 9, dtype))

    def replica():
        context = tf.distribute.get_replica_context()
        tensors = [
            numbers(300, 70), numbers(), numbers(0, 3), numbers(5, dtype=np.float64),
            tf.cast(numbers(7), tf.int32), tf.cast(numbers(40_000), tf.bfloat16), numbers(13),
        ]  # fmt: skip
        rows = numbers(2 + rank, 3)
        slices = tf.IndexedSlices(numbers(1 + rank, 2), tf.range(1 + rank), tf.constant([9, 2]))
        joined = context.all_reduce(SUM, slices)
        return [
            *(
                context.all_reduce(SUM, tensors)
                if engine_of(STRATEGY)
                else [context.all_reduce(SUM, tensor) for tensor in tensors]
            ),  # the ring reduces one type at a time
            context.all_reduce(MEAN, numbers(4)),
            context.all_gather(rows, axis=0),
            context.all_gather(tf.transpose(rows), axis=1),
            context.all_gather(numbers(2, 3, 1 + rank), axis=2),
            tf.math.unsorted_segment_sum(joined.values, joined.indices, 9),
        ]

    results = tf.function(lambda: STRATEGY.run(replica), autograph=False)()
    eager = STRATEGY.reduce(SUM, numbers(6), axis=None)
    return [np.asarray(r, np.float64) if r.dtype == tf.bfloat16 else r.numpy() for r in [*results, eager]]


class Job(ctl.Trainer):
    """Embedding rows, statistics of all replicas and a norm limit."""

    def build(self):
        self.model = keras.Sequential([
            keras.layers.Embedding(5000, 4), keras.layers.Flatten(),
            keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(3),
        ])  # fmt: skip
        self.model.build([None, 2])
        self.optimizer = keras.optimizers.Adam(0.01)
        self.gradients = ctl.Gradients(clip_norm=0.5)

    def train_data(self, batch_size):
        x = np.random.default_rng(3).integers(0, 5000, [64, 2])
        return ctl.from_arrays((x, x[:, 0] % 3), batch_size, seed=1)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                y, self.model(x, training=True), from_logits=True
            )
            loss = self.average(losses)
        self.minimize(loss, tape, self.model.trainable_variables)
        return {"loss": losses}


class Half(Job):
    """A job that permits gradients with 16 bits."""

    def build(self):
        super().build()
        self.gradients = ctl.Gradients(clip_norm=0.5, wire_dtype="bfloat16")


def trained(steps=6, job=Job, **options) -> tuple[list, Job]:
    trainer = job(strategy=STRATEGY, global_batch_size=12, writers=[], seed=4, **options)
    trainer.train(steps)
    return [np.array(w) for w in trainer.model.get_weights()], trainer


def train_small(steps=2, **options) -> Small:
    """Trains a small model for which `auto` selects a path."""
    no_intervals = every_step(log=ctl.Every(), save=ctl.Every())
    trainer = Small(strategy=STRATEGY, writers=[], intervals=no_intervals, communication="auto", **options)
    trainer.train(steps)
    return trainer


def are_equal(arrays, other_arrays) -> bool:
    return len(arrays) == len(other_arrays) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(arrays, other_arrays, strict=True)
    )


def main(directory: Path) -> None:
    results = {"paths": sorted(set(ENGINE._mesh.paths.values()))}
    over_tcp, (weights_tcp, _) = run_all_collectives(), trained(communication="tcp")
    results["rounded"] = []
    for ENGINE.all_share_memory in (False, True):
        weights, _ = trained(3, Half, communication="tcp")
        results["rounded"].append(not are_equal(weights, trained(3, communication="tcp")[0]))
    install_engine(STRATEGY, None)
    over_ring, (weights_ring, _) = run_all_collectives(), trained(communication="ring")
    results["sums"], results["weights"] = (
        are_equal(over_tcp, over_ring),
        are_equal(weights_tcp, weights_ring),
    )

    lines: list[str] = []
    logging.getLogger("ctl").setLevel(logging.INFO)
    logging.getLogger("ctl").addHandler(logging.Handler())
    logging.getLogger("ctl").handlers[-1].emit = lambda record: lines.append(record.getMessage())
    train_small()
    results["measured"] = [line for line in lines if line.startswith("communication:")]
    results["fits"] = not results["measured"] or results["measured"][0].endswith(
        "tcp" if engine_of(STRATEGY) else "ring"
    )

    measure = communication_choice._measured
    results["kept"] = []
    for fastest_path in ("ring", "tcp"):  # the second run resumes the first, which keeps its path
        communication_choice._measured = lambda *_, f=fastest_path: {
            p: float(p != f) for p in ("ring", "tcp")
        }
        install_engine(STRATEGY, None)
        communication_choice._measured_paths.clear()
        train_small(2 + 2 * len(results["kept"]), model_dir=str(directory / "kept"))
        results["kept"].append("tcp" if engine_of(STRATEGY) else "ring")
    communication_choice._measured = measure

    install_engine(STRATEGY, None)
    engine_all_reduce._CONNECT_SECS = 4.0
    if STRATEGY.cluster_resolver.task_id == 1:
        engine_all_reduce.Engine = raise_connection_error
    lines.clear()
    communication_choice._measured_paths.clear()
    trainer = train_small()
    results["unreachable"] = [engine_of(STRATEGY) is None, trainer.step == 2, lines]
    try:
        engine_all_reduce.use_engine(STRATEGY, trainer.topology, PeerLimits())
    except ctl.PeerLostError as e:
        results["refused"] = str(e)
    print(json.dumps(results))


def raise_connection_error(*_, **__):
    raise HorovodInternalError("no way to rank 0")


main(Path(sys.argv[1]))
