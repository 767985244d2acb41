"""A worker is lost while a hook or a callback of another one evaluates: the job is to be restarted."""

import pytest

pytestmark = pytest.mark.workers

PROGRAM = """
import json, os, sys
import ctl
import tensorflow as tf
from small_models import Small, every_step


class Evaluates(Small):
    def evaluate_without_peer(self):
        if not self.topology.is_chief:
            os._exit(9)
        if sys.argv[1] != "hook":
            self.strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([2])))
        self.evaluate()


class InHook(Evaluates):
    def after_loop(self, step, means):
        if step == 2:
            self.evaluate_without_peer()


class Callback(ctl.NullCallback):
    def before_training(self, trainer, step):
        self.trainer = trainer

    def on_metrics(self, step, values, run):
        if step == 2:
            self.trainer.evaluate_without_peer()


trainer_class, callbacks = (Evaluates, [Callback()]) if sys.argv[1] == "callback" else (InHook, [])
intervals = every_step(steps_per_loop=1)
communication = "auto" if sys.argv[1] == "hook" else "ring"
trainer = trainer_class(strategy="multi_worker", writers=[], intervals=intervals, callbacks=callbacks,
                        communication=communication)
try:
    trainer.train(4)
except ctl.CtlError as e:
    print(json.dumps({"code": e.exit_code, "step": trainer.step, "error": str(e)}), flush=True)
"""


@pytest.mark.parametrize("caller", ["hook", "callback", "collective"])
def test_a_lost_worker_is_no_error_of_the_method_of_the_user(run_program, caller):
    chief, lost = run_program(2, ["-c", PROGRAM, caller])
    assert lost.code == 9 and chief.json["code"] == 134, chief.output
    assert chief.json["step"] == 2 and "after_loop" not in chief.json["error"], chief.json
