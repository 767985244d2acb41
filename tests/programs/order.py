"""A worker of a job in which the chief executes one additional collective, selected by argv[1]."""

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
        self.collective = sys.argv[1]

    def train_step(self, batch):
        scores = super().train_step(batch)
        self.seen.update_state(scores["loss"])
        return scores

    def after_loop(self, step, means):
        if step < 3 or (self.collective != "same" and not self.topology.is_chief):
            return
        if self.collective in ("metric", "same"):
            self.seen.result()  # LINE metric
        elif self.collective == "reduce":
            self.strategy.run(one_sum)  # LINE reduce
        elif self.collective == "variable":
            with self.strategy.scope():
                tf.Variable(1.0)  # LINE variable
        elif self.collective == "evaluate":
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
