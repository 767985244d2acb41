"""Two workers sum over TensorFlow's ring and over the engine, and compare; argv[1] is for checkpoints."""

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


def everything() -> list:
    """What each kind of collective of the strategy gives."""
    me = STRATEGY.cluster_resolver.task_id
    random = np.random.default_rng(me)

    def numbers(*shape, dtype=np.float32):
        return tf.identity(tf.constant(random.normal(size=shape) * 9, dtype))

    def replica():
        context = tf.distribute.get_replica_context()
        several = [
            numbers(300, 70), numbers(), numbers(0, 3), numbers(5, dtype=np.float64),
            tf.cast(numbers(7), tf.int32), tf.cast(numbers(40_000), tf.bfloat16), numbers(13),
        ]  # fmt: skip
        rows = numbers(2 + me, 3)
        slices = tf.IndexedSlices(numbers(1 + me, 2), tf.range(1 + me), tf.constant([9, 2]))
        joined = context.all_reduce(SUM, slices)
        return [
            *(
                context.all_reduce(SUM, several)
                if engine_of(STRATEGY)
                else [context.all_reduce(SUM, one) for one in several]
            ),  # which takes one type at a time
            context.all_reduce(MEAN, numbers(4)),
            context.all_gather(rows, axis=0),
            context.all_gather(tf.transpose(rows), axis=1),
            context.all_gather(numbers(2, 3, 1 + me), axis=2),
            tf.math.unsorted_segment_sum(joined.values, joined.indices, 9),
        ]

    results = tf.function(lambda: STRATEGY.run(replica), autograph=False)()
    eager = STRATEGY.reduce(SUM, numbers(6), axis=None)
    return [np.asarray(r, np.float64) if r.dtype == tf.bfloat16 else r.numpy() for r in [*results, eager]]


class Job(ctl.Trainer):
    """Rows of an embedding, statistics of all replicas, a limit of the norm."""

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
    """Gradients may travel with 16 bits."""

    def build(self):
        super().build()
        self.gradients = ctl.Gradients(clip_norm=0.5, wire_dtype="bfloat16")


def trained(steps=6, job=Job, **options) -> tuple[list, Job]:
    trainer = job(strategy=STRATEGY, global_batch_size=12, writers=[], seed=4, **options)
    trainer.train(steps)
    return [np.array(w) for w in trainer.model.get_weights()], trainer


def chosen(steps=2, **options) -> Small:
    """A smaller one, for which a path is chosen."""
    never = every_step(log=ctl.Every(), save=ctl.Every())
    trainer = Small(strategy=STRATEGY, writers=[], intervals=never, communication="auto", **options)
    trainer.train(steps)
    return trainer


def equal(some, others) -> bool:
    return len(some) == len(others) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(some, others, strict=True)
    )


def main(where: Path) -> None:
    found = {"paths": sorted(set(ENGINE._mesh.paths.values()))}
    over_tcp, (weights_tcp, _) = everything(), trained(communication="tcp")
    found["rounded"] = []
    for ENGINE.all_share_memory in (False, True):
        weights, _ = trained(3, Half, communication="tcp")
        found["rounded"].append(not equal(weights, trained(3, communication="tcp")[0]))
    install_engine(STRATEGY, None)
    over_ring, (weights_ring, _) = everything(), trained(communication="ring")
    found["sums"], found["weights"] = equal(over_tcp, over_ring), equal(weights_tcp, weights_ring)

    lines: list[str] = []
    logging.getLogger("ctl").setLevel(logging.INFO)
    logging.getLogger("ctl").addHandler(logging.Handler())
    logging.getLogger("ctl").handlers[-1].emit = lambda record: lines.append(record.getMessage())
    chosen()
    found["measured"] = [line for line in lines if line.startswith("communication:")]
    found["fits"] = not found["measured"] or found["measured"][0].endswith(
        "tcp" if engine_of(STRATEGY) else "ring"
    )

    measure = communication_choice._measured
    found["kept"] = []
    for faster in ("ring", "tcp"):  # the second run goes on from the first: its path stays
        communication_choice._measured = lambda *_, f=faster: {p: float(p != f) for p in ("ring", "tcp")}
        install_engine(STRATEGY, None)
        communication_choice._measured_paths.clear()
        chosen(2 + 2 * len(found["kept"]), model_dir=str(where / "kept"))
        found["kept"].append("tcp" if engine_of(STRATEGY) else "ring")
    communication_choice._measured = measure

    install_engine(STRATEGY, None)
    engine_all_reduce._CONNECT_SECS = 4.0
    if STRATEGY.cluster_resolver.task_id == 1:
        engine_all_reduce.Engine = fails
    lines.clear()
    communication_choice._measured_paths.clear()
    trainer = chosen()
    found["unreachable"] = [engine_of(STRATEGY) is None, trainer.step == 2, lines]
    try:
        engine_all_reduce.use_engine(STRATEGY, trainer.topology, PeerLimits())
    except ctl.PeerLostError as e:
        found["refused"] = str(e)
    print(json.dumps(found))


def fails(*_, **__):
    raise HorovodInternalError("no way to rank 0")


main(Path(sys.argv[1]))
