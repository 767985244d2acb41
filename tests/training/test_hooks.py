"""Hooks of a trainer: order of events, arguments, decisions and errors."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import some_of
from small_models import BATCH, CLASSES, EXAMPLES, Small, every_step, examples, weights

PER_EPOCH = EXAMPLES // BATCH  # 4 steps
EVERY_2 = every_step(log=ctl.Every(steps=2), save=ctl.Every(steps=2), evaluate=ctl.Every(steps=2))


class Counts(keras.metrics.Metric):
    """A metric that sums arrays."""

    def __init__(self, shape, **options):
        super().__init__(**options)
        self.total = self.add_weight(shape=shape, initializer="zeros", name="total")

    def update_state(self, values):
        self.total.assign_add(values)

    def result(self):
        return self.total


class Counting(Small):
    """A trainer that evaluates a confusion matrix and records the arguments of its hooks."""

    def __init__(self, **options):
        super().__init__(strategy="default", writers=[], **options)
        self._events = []

    def build(self):
        super().build()
        self.hits = Counts((CLASSES, CLASSES), name="hits")

    def eval_step(self, batch):
        scores = super().eval_step(batch)
        predictions = tf.argmax(self.model(batch[0]), axis=1)
        self.hits.update_state(tf.math.confusion_matrix(batch[1], predictions, CLASSES, dtype=tf.float32))
        return {**scores, "hits": self.hits}

    def before_training(self, step):
        self._events.append(("before", step, int(self.optimizer.iterations.numpy())))

    def after_epoch(self, epoch, step, means):
        self._events.append(("epoch", epoch, step, sorted(means)))

    def after_evaluation(self, step, means, metrics):
        counted = np.asarray(metrics["hits"].result())
        self._events.append(("evaluation", step, sorted(means), counted.sum() > 0))


def test_the_events_have_the_documented_order_and_arguments():
    trainer = Counting(intervals=EVERY_2)
    trainer.train(5)
    after = ["gradient_norm", "loss"]
    assert trainer._events == [
        ("before", 0, 0), ("evaluation", 2, ["loss"], True), ("epoch", 1, 4, after),
        ("evaluation", 4, ["loss"], True), ("evaluation", 5, ["loss"], True),
    ]  # fmt: skip
    trainer.train(6)
    assert trainer._events[5] == ("before", 5, 5)


def test_an_epoch_end_ends_a_loop():
    """Loops end with the epoch although neither logging nor saving is due then."""
    trainer = Counting(intervals=every_step(log=ctl.Every(steps=100), steps_per_loop=3))
    trainer.train(2 * PER_EPOCH + 1)
    assert [e[1:3] for e in trainer._events if e[0] == "epoch"] == [(1, 4), (2, 8)]


def test_callbacks_have_the_same_events_and_are_given_the_trainer():
    class Recording:
        events = ()

        def before_training(self, trainer, step):
            self.events += (("before", trainer.step),)

        def after_evaluation(self, trainer, step, means, metrics):
            self.events += ((step, type(metrics["hits"]).__name__),)
            return ctl.Decision(stop=step == 2)

    recording = Recording()
    trainer = Counting(intervals=EVERY_2, callbacks=[recording])
    trainer.train(9)
    assert recording.events == (("before", 0), (2, "Counts")) and trainer.step == 2


def test_decisions_apply_at_marks_only():
    """The evaluation at the end of a run and one outside a run do not change the learning rate."""

    class Halving(Counting):
        def after_evaluation(self, step, means, metrics):
            return ctl.Decision(learning_rate_factor=0.5)

    trainer = Halving(intervals=EVERY_2)
    trainer.train(5)
    trainer.evaluate()
    assert float(trainer.optimizer.learning_rate.numpy()) == pytest.approx(0.1 / 4)


EVENTS = ["before_training", "after_epoch", "after_evaluation", "on_metrics", "on_begin"]


@pytest.mark.parametrize("event", some_of(EVENTS, "after_epoch"))
def test_an_error_of_a_hook_is_raised_after_a_save(tmp_path, event, caplog):
    class Failing:
        def fail(self, *_):
            raise ZeroDivisionError(event)

    failing = Failing()
    setattr(failing, event, failing.fail)
    options = {"model_dir": str(tmp_path), "intervals": every_step(evaluate=ctl.Every(steps=2))}
    trainer = Counting(callbacks=[failing], **options)
    with pytest.raises(ZeroDivisionError, match=event):
        trainer.train(6)
    assert ("evaluation", 4) not in [entry[:2] for entry in trainer._events]
    step = {"after_epoch": 4, "after_evaluation": 2, "on_metrics": 1}.get(event, 0)
    assert trainer.step == step
    if step:
        assert f"{event} failed at step {step}; the run ends after a last save" in caplog.text
    resumed = Counting(**options)
    resumed.prepare()
    assert resumed.step == step
    for a, b in zip(weights(resumed), weights(trainer), strict=True):
        np.testing.assert_array_equal(a, b)
    resumed.train(3)
    is_evaluated = ("evaluation", 2) in [entry[:2] for entry in resumed._events]
    assert is_evaluated == (step < 3), "a failed evaluation is pending"


def test_an_error_of_an_evaluation_hook_outside_a_run_is_raised():
    class Failing(Counting):
        def after_evaluation(self, step, means, metrics):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Failing().evaluate()


@pytest.mark.parametrize("returned, error_pattern", [
    (5, r"after_epoch returned 5; expected a ctl.Decision\(...\), True to stop, or None"),
    (True, None),
])  # fmt: skip
def test_a_hook_returns_a_decision_or_true_to_stop(returned, error_pattern):
    class Returning(Counting):
        def after_epoch(self, epoch, step, means):
            return returned

    trainer = Returning()
    if error_pattern is None:
        trainer.train(9)
        assert trainer.step == 4
        return
    with pytest.raises(ctl.UsageError, match=error_pattern):
        trainer.train(9)


def test_hooks_that_would_never_be_called_are_refused():
    class NotEvaluated(Small):
        eval_step = ctl.Trainer.eval_step

        def after_evaluation(self, step, means, metrics):
            pass

    with pytest.raises(ctl.UsageError, match="after_evaluation would never be called.*eval_step"):
        NotEvaluated(strategy="default", writers=[]).train(1)

    class Endless(Counting):
        def train_data(self, batch_size):
            return tf.data.Dataset.from_tensors(examples()).unbatch().batch(batch_size).repeat()

    with pytest.raises(ctl.UsageError, match="after_epoch.*finite train_data"):
        Endless().train(3)
    with pytest.raises(ctl.UsageError, match=r"callbacks\[0\].*on_metrics.*or one of .*before_training"):
        Counting(callbacks=[object()]).train(1)
    with pytest.raises(ctl.UsageError, match="EarlyStopping of Keras, which is for ctl.fit"):
        Counting(callbacks=[keras.callbacks.EarlyStopping("loss")]).train(1)


def test_a_matrix_is_written_to_tensorboard_once_and_not_as_a_scalar():
    writer = ctl.MemoryWriter()
    trainer = Counting(intervals=EVERY_2)
    trainer._writers = [writer]
    trainer.train(2)
    assert [sorted(values) for run, _, values in writer.rows if run == "eval"] == [["loss"]]
    pictures = [e for e in writer.events if getattr(e, "name", None) == "hits"]
    assert [(e.step, e.run, type(e).__name__) for e in pictures] == [(2, "eval", "ImageLogged")]
    results = trainer.evaluate()
    assert results["hits"].shape == (CLASSES, CLASSES) and isinstance(results["loss"], float)


def test_a_vector_metric_of_the_training_is_written_as_a_table():
    class Vector(Small):
        def build(self):
            super().build()
            self.each = Counts((2,), name="each")

        def train_step(self, batch):
            self.each.update_state([1.0, 2.0])
            return {**super().train_step(batch), "each": self.each}

    writer = ctl.MemoryWriter()
    trainer = Vector(strategy="default", writers=[writer], intervals=every_step(log=ctl.Every(steps=2)))
    trainer.train(4)
    tables = [e for e in writer.events if getattr(e, "name", None) == "each"]
    assert [(e.step, e.run) for e in tables] == [(2, "train"), (4, "train")]
    assert tables[0].text.splitlines()[2:] == ["| 0 | 2 |", "| 1 | 4 |"]
    assert all("each" not in name for _, _, values in writer.rows for name in values)


def test_metrics_that_are_built_by_their_first_update_count_on_replicas(two_replicas):
    class Late(Small):
        def build(self):
            super().build()
            self.mean = tf_keras.metrics.MeanTensor(name="mean")
            self.area = keras.metrics.AUC(multi_label=True, name="area")

        def eval_step(self, batch):
            scores = tf.nn.softmax(self.model(batch[0]))
            self.mean.update_state(tf.reduce_mean(scores, axis=0), 1.0)
            self.area.update_state(y_true=tf.one_hot(batch[1], CLASSES), y_pred=scores)
            return {**super().eval_step(batch), "mean": self.mean, "area": self.area}

        def eval_data(self, batch_size):
            return examples()

    options = {"writers": [], "global_batch_size": 8}
    expected, two = (Late(strategy=s, **options).evaluate() for s in ("default", two_replicas))
    assert expected["mean"].shape == (CLASSES,) and 0 < expected["area"] < 1
    np.testing.assert_allclose(two["mean"], expected["mean"], rtol=1e-5)
    assert two["area"] == pytest.approx(expected["area"], rel=1e-5)
