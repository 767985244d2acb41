"""A worker whose chief does one collective more than the others, in one of several ways."""

import sys

import ctl
import keras
import tensorflow as tf
from small_models import Small, every_step


def one_sum():
    return tf.distribute.get_replica_context().all_reduce("sum", tf.ones([]))


class Uneven(Small):
    def build(self):
        super().build()
        self.seen = keras.metrics.Mean(name="seen")
        self.how = sys.argv[1]

    def train_step(self, batch):
        scores = super().train_step(batch)
        self.seen.update_state(scores["loss"])
        return scores

    def after_loop(self, step, means):
        if step < 3 or (self.how != "same" and not self.topology.is_chief):
            return
        if self.how in ("metric", "same"):
            self.seen.result()  # LINE metric
        elif self.how == "reduce":
            self.strategy.run(one_sum)  # LINE reduce
        elif self.how == "variable":
            with self.strategy.scope():
                tf.Variable(1.0)  # LINE variable
        elif self.how == "evaluate":
            self.evaluate()  # LINE evaluate


trainer = Uneven(
    strategy=ctl.make_strategy("multi_worker"), intervals=every_step(steps_per_loop=1), writers=[]
)
trainer.check_collectives = True
try:
    trainer.train(5)
    print('{"error": ""}')
except ctl.UsageError as e:
    import json

    print(json.dumps({"error": str(e), "step": trainer.step}), flush=True)
    import os

    os._exit(2)
