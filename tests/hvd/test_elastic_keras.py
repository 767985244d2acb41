"""Elastic state of Keras models, of Keras 3 and tf_keras; and `model.fit` in an elastic job."""

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from ctl.collectives.ranks import Ranks
from ctl.errors import UsageError
from ctl.hvd import elastic, process
from ctl.hvd.errors import HorovodInternalError, HostsUpdatedInterrupt
from ctl.hvd.keras import elastic as keras_elastic
from elastic_jobs import PROGRAMS, ElasticJob

pytestmark = pytest.mark.workers


@pytest.fixture
def single_rank():
    """Runs a test in a job of one rank in this process."""
    process.init()
    yield
    process.shutdown()


@pytest.fixture
def job(tmp_path):
    started = []

    def start(*arguments, **options):
        started.append(ElasticJob(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for elastic_job in started:
        elastic_job.close()


MAKERS = {
    "keras 3": (keras, lambda: keras.optimizers.Adam(0.1)),
    "keras 3, loss scale": (keras, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1))),
    "tf_keras": (tf_keras, lambda: tf_keras.optimizers.Adam(0.1)),
    "tf_keras, legacy": (tf_keras, lambda: tf_keras.optimizers.legacy.Adam(0.1)),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("is_trained", [False, True], ids=["not built", "built"])
def test_a_model_and_its_optimizer_go_back_to_the_last_commit(single_rank, maker, is_trained):
    module, make = MAKERS[maker]
    layers = [module.layers.Dense(3, activation="relu"), module.layers.BatchNormalization()]
    model = module.Sequential([module.layers.InputLayer((2,)), *layers, module.layers.Dense(1)])
    model.compile(make(), "mse")
    x, y = np.arange(8, dtype="float32").reshape(4, 2), np.ones([4, 1], "float32")

    def fit():
        model.fit(x, y, epochs=2, batch_size=2, shuffle=False, verbose=0)
        return [np.array(w) for w in model.get_weights()]

    if is_trained:
        fit()
    state = elastic.TensorFlowKerasState(model, batch=3)
    state.sync()
    once = fit()
    state.batch = 9
    state.restore()
    assert state.batch == 3
    weights_after_restore = fit()
    assert all(np.array_equal(a, b) for a, b in zip(once, weights_after_restore, strict=True))
    state.commit()
    fit()
    state.restore()
    assert all(np.array_equal(a, np.array(b)) for a, b in zip(once, model.get_weights(), strict=True))
    assert state.batch == 3


def test_variables_and_objects_go_back_to_the_last_commit(single_rank):
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3, dtype=tf.int64)]
    state = elastic.TensorFlowState(variables, epoch=1, seen=[1])
    variables[0].assign_add([1.0, 1.0])
    state.epoch = 2
    state.commit()
    variables[0].assign([0.0, 0.0])
    variables[1].assign(0)
    state.epoch, state.seen = 7, []
    state.restore()
    assert variables[0].numpy().tolist() == [2.0, 3.0] and int(variables[1]) == 3
    assert (state.epoch, state.seen) == (2, [1])


def test_unsupported_state_is_one_sentence(single_rank):
    with pytest.raises(UsageError, match=r"call model.build\(input_shape\) first"):
        elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(UsageError, match="eager mode"):
        elastic.TensorFlowState([tf.Variable(1.0)], session=object())
    with pytest.raises(UsageError, match="expected 1 or more"):
        keras_elastic.CommitStateCallback(elastic.ObjectState(), batches_per_commit=0)


@pytest.mark.parametrize("error", [HorovodInternalError("lost"), HostsUpdatedInterrupt(True)])
def test_a_job_that_is_not_elastic_raises_errors_unchanged(single_rank, error):
    calls = []

    @elastic.run
    def train(state, argument):
        calls.append(argument)
        raise error

    with pytest.raises(type(error)):
        train(elastic.ObjectState(step=0), "a")
    assert calls == ["a"]


class Elastic:
    """A substitute for the launcher connection that every `commit` of one rank polls."""

    def __init__(self, monkeypatch):
        self.skips: list[bool] = []
        self.must_sync = True
        monkeypatch.setattr(elastic.elastic_line, "is_elastic", lambda: True)
        monkeypatch.setattr(elastic.elastic_line, "connect_group", lambda connect: connect(Ranks()))
        monkeypatch.setattr(elastic.elastic_line, "set_loss_listener", lambda listener: None)
        monkeypatch.setattr(elastic.elastic_line, "add_listener", lambda state: None)
        monkeypatch.setattr(elastic.elastic_line, "report_synced", lambda: None)
        monkeypatch.setattr(elastic.elastic_line, "set_skip_sync", self.skips.append)
        monkeypatch.setattr(elastic.elastic_line, "must_sync", lambda: self.must_sync)


class Watched(elastic.ObjectState):
    """A recorder of calls."""

    def __init__(self, **kwargs):
        self.__dict__["did"] = []
        super().__init__(**kwargs)

    def restore(self):
        self.did.append("restore")
        super().restore()

    def sync(self):
        self.did.append("sync")
        super().sync()

    def reset(self):
        self.did.append("reset")


def train_once_after(error, state):
    errors = [error]

    @elastic.run
    def train(state):
        if errors:
            state.step += 1
            raise errors.pop()
        return state.step

    return train(state)


def test_a_lost_rank_means_restore_reset_and_sync(single_rank, monkeypatch):
    line, state = Elastic(monkeypatch), Watched(step=1)
    state.register_reset_callbacks([lambda: state.did.append("callback")])
    assert train_once_after(HorovodInternalError("lost"), state) == 1
    assert state.did == ["sync", "restore", "reset", "callback", "sync"] and line.skips == [False]


@pytest.mark.parametrize("is_raised_by", ["py_function", "tf"])
def test_a_lost_rank_is_understood_out_of_a_function_of_tensorflow(single_rank, monkeypatch, is_raised_by):
    Elastic(monkeypatch)
    state = Watched(step=1)
    try:
        if is_raised_by == "tf":
            raise tf.errors.UnknownError(None, None, "HorovodInternalError: rank 1 is gone")

        def lose():
            raise HorovodInternalError("rank 1 is gone")

        tf.function(lambda: tf.py_function(lose, [], tf.int32))()
    except (tf.errors.OpError, HorovodInternalError) as e:
        error = e
    assert train_once_after(error, state) == 1
    assert "restore" in state.did


def test_added_hosts_cause_no_restore_and_a_sync(single_rank, monkeypatch):
    line, state = Elastic(monkeypatch), Watched(step=1)
    assert train_once_after(HostsUpdatedInterrupt(False), state) == 2
    assert state.did == ["sync", "reset", "sync"] and line.skips == [False]


@pytest.mark.parametrize("must_sync", [False, True], ids=["all agree", "others need it"])
def test_hosts_that_only_go_mean_no_sync_unless_others_need_it(single_rank, monkeypatch, must_sync):
    line, state = Elastic(monkeypatch), Watched(step=1)
    line.must_sync = must_sync
    assert train_once_after(HostsUpdatedInterrupt(True), state) == 2
    assert state.did == ["sync", "reset", *(["sync"] if must_sync else [])]
    assert line.skips == [True]


def test_other_errors_are_the_script_s_own(single_rank, monkeypatch):
    Elastic(monkeypatch)
    state = Watched(step=1)
    with pytest.raises(ZeroDivisionError):
        train_once_after(ZeroDivisionError(), state)
    with pytest.raises(tf.errors.NotFoundError):
        train_once_after(tf.errors.NotFoundError(None, None, "no file"), state)
    assert state.did == ["sync", "sync"]


@pytest.mark.parametrize(("changes", "skip_sync"), [((1,), True), ((2,), False), ((1, 2), False)])
def test_a_commit_raises_once_hosts_have_changed(single_rank, monkeypatch, changes, skip_sync):
    Elastic(monkeypatch)
    state = elastic.ObjectState(step=1)
    state.commit()
    for change in changes:
        state.on_hosts_updated(0.0, change)
    state.step = 2
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is skip_sync
    state.step = 3
    state.restore()
    assert state.step == 2  # saved before it was raised
    state.on_reset()
    state.commit()


def test_a_state_with_an_arbitrary_object_is_refused_with_the_option_that_allows_it(single_rank):
    state = elastic.ObjectState(thing=object())
    with pytest.raises(UsageError):
        state.sync()
    state.allow_pickle = True
    state.sync()


def test_fit_continues_after_a_rank_was_killed_and_another_joined(job):
    started = job(
        "127.0.0.1:2", "-np", "2", "--min-np", "1", last_step=12, program=PROGRAMS / "elastic_fit.py"
    )
    before = started.wait_for_step(3, size=2)
    os.kill(before[0]["pid"], signal.SIGKILL)
    started.wait(lambda: "group 3: 2 ranks" in started.output)
    started.go(12)
    after = started.wait_for_step(12, size=2)
    code, output = started.end()
    assert code == 0, output[-6000:]
    assert after[0]["pid"] == before[1]["pid"]
    for fact in (f for f in started.facts if "step" in f):
        assert fact["weights"] == [float(fact["step"])] * fact["size"]
        assert fact["epoch"] * 4 + fact["batch"] == fact["step"]
