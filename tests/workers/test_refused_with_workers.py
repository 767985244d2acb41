"""Settings of two workers: refusals on all of them, and results that a single worker cannot have."""

import pytest

pytestmark = pytest.mark.workers

REFUSED = """
import json, sys
import ctl, keras, tensorflow as tf
from small_models import Small, every_step

strategy = ctl.make_strategy("multi_worker")


class Unowned(Small):
    def build(self):
        super().build()
        self._hidden = [tf.Variable(1.0)]

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            scores = self.score(batch, training=True)
            loss = self.average(scores["loss"] * self._hidden[0])
        self.minimize(loss, tape, variables=self._hidden)
        return scores


class Gathers(Small):
    def train_step(self, batch):
        self.gather(batch[0])
        return super().train_step(batch)


class Synchronized(Small):
    def build(self):
        super().build()
        layers = [keras.layers.BatchNormalization(synchronized=True, name="moments"), keras.layers.Dense(4)]
        self.model = keras.Sequential([keras.Input((8,)), *layers])


messages = {}
for trainer_class in (Unowned, Gathers, Synchronized):
    try:
        trainer_class(strategy=strategy, writers=[], intervals=every_step(), sync_every=4).train(1)
    except ctl.UsageError as e:
        messages[trainer_class.__name__] = str(e)
print(json.dumps(messages), flush=True)
"""

LOCAL_ADAM = """
import json, logging, sys
import ctl
from small_models import Small, digest, every_step

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
trainer = Small(strategy="auto", optimizer="adam", writers=[], model_dir=sys.argv[1], sync_every=2,
                intervals=every_step(save=ctl.Every(steps=2)))
trainer.train(int(sys.argv[2]))
print(json.dumps({"digest": digest(trainer), "step": trainer.step}), flush=True)
"""

ROUNDED = """
import json
import ctl
from small_models import Small, digest, every_step


class Rounded(Small):
    def build(self):
        super().build()
        self.gradients = ctl.Gradients(wire_dtype="int8")


strategy, digests = ctl.make_strategy("multi_worker"), []
for trainer_class in (Small, Rounded):
    trainer = trainer_class(strategy=strategy, writers=[], intervals=every_step())
    trainer.train(3)
    digests.append(digest(trainer))
print(json.dumps({"digests": digests}), flush=True)
"""

MISSING_FILE = """
import json, sys
import ctl
from small_models import Small, every_step

trainer = Small(strategy="multi_worker", writers=[], intervals=every_step())
trainer.init_from = sys.argv[1] if trainer.topology.is_chief else sys.argv[1] + ".missing"
try:
    trainer.prepare()
except ctl.CtlError as e:
    print(json.dumps({"code": e.exit_code, "error": str(e)}), flush=True)
"""


def test_what_workers_with_local_steps_cannot_do_is_refused_on_all_of_them(run_program):
    for result in run_program(2, ["-c", REFUSED]):
        messages = result.json
        assert "which no attribute of the trainer owns: with sync_every" in messages["Unowned"]
        assert "gather() with sync_every: workers train independently" in messages["Gathers"]
        assert "sync_every=4 with the layer 'moments', which sums over workers" in messages["Synchronized"]


def test_another_number_of_workers_continues_with_the_mean_of_their_optimizers(run_program, tmp_path):
    results = run_program(2, ["-c", LOCAL_ADAM, str(tmp_path), "4"])
    assert [r.json["step"] for r in results] == [4, 4], results[0].output
    assert len({r.json["digest"] for r in results}) == 1
    (result,) = run_program(1, ["-c", LOCAL_ADAM, str(tmp_path), "6"])
    assert result.json["step"] == 6, result.output
    assert "has the optimizers of 2 workers, and this job has 1: each worker uses their" in result.output


def test_small_gradients_are_not_rounded_to_8_bits(run_program):
    for result in run_program(2, ["-c", ROUNDED]):
        first, second = result.json["digests"]
        assert first == second


def test_weights_that_only_the_chief_sees_are_refused_on_all_workers(run_program, tmp_path):
    from small_models import Small

    trainer = Small(strategy="default", writers=[])
    trainer.prepare()
    trainer.model.save_weights(str(tmp_path / "a.weights.h5"))
    first, second = run_program(2, ["-c", MISSING_FILE, str(tmp_path / "a.weights.h5")])
    assert (first.json["code"], second.json["code"]) == (2, 2), second.output
    assert "exists on the chief but not on this worker; expected the same files" in second.json["error"]
