"""Metadata of a run: its parameters, the trainer's `repr`, its results."""

import copy
import json
import pickle

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from ctl.checkpoints.tracked_state import weights_of
from ctl.metrics.protocol import Progressed, Started, Traced
from ctl.metrics.results import Results
from fitting import classifier
from small_models import CLASSES, FEATURES, HIDDEN, Small, every_step
from test_frozen_layers import Freezes

WEIGHTS = FEATURES * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES


class EventWriter(ctl.NullWriter):
    """A writer that stores the events of a run."""

    def __init__(self):
        self.events = []

    def note(self, event):
        self.events.append(event)

    def parameters(self):
        return next(e for e in self.events if isinstance(e, Started)).info.parameters


def started(trainer_class, **options):
    writer = EventWriter()
    trainer = trainer_class(strategy="default", writers=[writer], intervals=every_step(), **options)
    trainer.train(1)
    return trainer, writer.parameters()


class WithExtras(Small):
    """A trainer with variables that are no weights."""

    def build(self):
        super().build()
        self.mean = keras.metrics.Mean(name="mean")
        self.nested_metrics = {"metrics": [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]}
        self.noise = keras.random.SeedGenerator(3)
        self.scale = tf.Variable(1.0)
        self.shift = keras.Variable(np.zeros(2, np.float32))

    def train_step(self, batch):
        self.mean.update_state(1.0)
        return super().train_step(batch) | {"mean": self.mean}


@pytest.mark.parametrize("framework", ["keras3", "tf_keras", "module"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_parameters_are_those_of_models(framework, optimizer):
    _, parameters = started(Small, framework=framework, optimizer=optimizer, dropout=0.5)
    assert sum(np.prod(shape) for _, shape, _, _ in parameters) == WEIGHTS
    assert len(parameters) == 4


def test_metrics_optimizers_and_seeds_are_no_parameters_and_the_user_s_variables_are():
    _, parameters = started(WithExtras, optimizer="adam", dropout=0.5)
    names = [name.split("/")[0] for name, _, _, _ in parameters]
    assert sorted(names) == ["model"] * 4 + ["scale", "shift"]


def test_a_compiled_model_has_as_many_parameters_as_in_keras():
    model = classifier()
    x, y = np.zeros((8, *model.input_shape[1:]), np.float32), np.zeros(8, np.int64)
    writer = EventWriter()
    ctl.fit(model, x, y, writers=[writer])
    assert model.metrics
    assert sum(np.prod(shape) for _, shape, _, _ in writer.parameters()) == model.count_params()


def test_metrics_within_a_model_of_tf_keras_are_no_parameters():
    class Counts(tf_keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.mean = tf_keras.layers.Dense(3), tf_keras.metrics.Mean(name="mean")
            self.dense.build((None, 2))

    model = Counts()
    assert len(model.weights) == 4
    assert sum(v.shape.num_elements() for v in weights_of(model)) == 9


def test_repr_of_a_trainer_shows_its_state_and_does_not_build_it(tmp_path):
    trainer = Small(strategy="default", writers=[])
    assert repr(trainer) == "Small(step 0, strategy default, no model_dir, not built)"
    assert trainer.model is None
    trainer = Small(strategy="default", writers=[], model_dir=str(tmp_path / "m"))
    result = trainer.train(2)
    shown = f"Small(step 2, strategy default, model_dir '{tmp_path}/m', {WEIGHTS} parameters)"
    assert repr(trainer) == str(trainer) == shown
    rounded = {name: float(f"{value:.6g}") for name, value in result.items()}
    assert repr(result) == repr(rounded) and rounded != result


def test_repr_counts_replicas_and_works_within_a_graph(two_replicas):
    class Printing(Small):
        def train_step(self, batch):
            shown.append(repr(self))
            return super().train_step(batch)

    shown = []
    trainer = Printing(strategy=two_replicas, writers=[])
    trainer.train(1)
    text = f"Printing(step 0, strategy mirrored with 2 replicas, no model_dir, {WEIGHTS} parameters)"
    assert set(shown) == {text}


def test_repr_does_not_raise_if_the_constructor_was_not_called():
    class WithoutInit(ctl.Trainer):
        def __init__(self):
            pass

    assert repr(WithoutInit()) == "WithoutInit()"


def test_results_are_dictionaries_with_short_numbers():
    values = {"loss": 0.2244170904159546, "steps": 123_456.0, "bad": float("inf"), "name": "x"}
    results = Results(values)
    assert repr(results) == "{'loss': 0.224417, 'steps': 123456.0, 'bad': inf, 'name': 'x'}"
    assert results == values and isinstance(results, dict)
    assert json.dumps(results) == json.dumps(values)
    assert pickle.loads(pickle.dumps(results)) == copy.deepcopy(results) == values
    assert type(results | {}) is dict


def test_each_loop_that_compiles_is_announced_before_its_progress():
    writer = EventWriter()
    trainer = Freezes(
        strategy="default", global_batch_size=8, writers=[writer],
        intervals=every_step(steps_per_loop=1, log=ctl.Every()),
    )  # fmt: skip
    trainer.train(6)  # a layer is frozen after 3
    trainer.train(8)
    order = [e for e in writer.events if isinstance(e, Traced | Progressed | Started)]
    kinds = [e.step if isinstance(e, Progressed) else type(e).__name__ for e in order]
    assert kinds == ["Started", "Traced", 1, 2, 3, "Traced", 4, 5, 6, "Started", 7, 8]
    assert [e.compiles for e in order if isinstance(e, Started)] == [True, False]


def test_a_learning_rate_that_a_function_returns_is_logged():
    class WithFunction(Small):
        def build(self):
            super().build()
            self.optimizer = keras.optimizers.SGD(lambda: 0.25)

    writer = ctl.MemoryWriter()
    WithFunction(strategy="default", writers=[writer], intervals=every_step()).train(1)
    assert writer.rows[0][2]["learning_rate"] == 0.25
