"""Exact restoration of saved states, and errors for damaged or unsuitable checkpoints."""

import json
import shutil

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.checkpoints import commit
from ctl.distribute.keras_objects import unwrap
from small_models import Small, every_step

MANAGERS = {
    "chief_only": lambda path: ctl.ChiefOnlyCheckpoints(path, keep=ctl.Keep(newest=3)),
    "memory": lambda path: ctl.MemoryCheckpoints(keep=ctl.Keep(newest=3)),
    "null": lambda path: ctl.NullCheckpoints(),
}
STORING_MANAGERS = [n for n in MANAGERS if n != "null"]


@pytest.fixture(scope="module")
def two_replicas():
    """Returns a strategy with separate collective keys: two strategies of one process would share keys."""

    class SeparateKeys(tf.distribute.MirroredStrategy):
        _collective_key_base = 3000

    return SeparateKeys(["/cpu:0", "/cpu:1"])


class Measured(Small):
    """A trainer with Adam, dropout and a Keras metric: all kinds of state in a checkpoint."""

    def __init__(self, hidden=16, **options):
        super().__init__(optimizer="adam", dropout=0.5, **options)
        self.hidden = hidden

    def build(self):
        super().build()
        self.mean_loss = keras.metrics.Mean(name="mean_loss")
        if self.hidden != 16:
            self.model = keras.Sequential([
                keras.Input((8,)), keras.layers.Dense(self.hidden), keras.layers.Dense(4)
            ])  # fmt: skip

    def train_step(self, batch):
        scores = super().train_step(batch)
        self.mean_loss.update_state(scores["loss"])
        return scores


def make_trainer(strategy="default", trainer_class=Measured, **options):
    return trainer_class(strategy=strategy, writers=[], intervals=every_step(log=ctl.Every()), **options)


def prepared(*arguments, **options):
    trainer = make_trainer(*arguments, **options)
    trainer.prepare()
    return trainer


def state(trainer):
    return trainer._prepared_trainer.state


def values(trainer):
    return {n: v.numpy().copy() for n, v in state(trainer).variables.items()}


def assert_same(expected, actual):
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(value, actual[name], err_msg=name)


def manifest(trainer, step, **options):
    return ctl.Manifest(step=step, created=1.0, variables=state(trainer).spec(), **options)


def fill(trainer, number):
    """Assigns values derived from `number` to all variables."""
    for i, variable in enumerate(state(trainer).variables.values()):
        if variable.dtype.is_floating:
            variable.assign(tf.fill(variable.shape, tf.cast(number + i / 64, variable.dtype)))
    trainer.step_variable.assign(number)


@pytest.fixture(scope="module")
def trained():
    trainer = make_trainer()
    trainer.train(3)
    return trainer


@pytest.fixture(scope="module")
def fresh():
    """Returns a trainer to restore into; its initial values are not used."""
    return prepared()


@pytest.fixture
def saved(tmp_path, fresh):
    """Returns a manager with checkpoints of steps 1, 2 and 3."""
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", keep=ctl.Keep(newest=0))
    for step in (1, 2, 3):
        fill(fresh, step)
        manager.save(state(fresh), manifest(fresh, step))
    return manager


def restored_step(manager, trainer):
    fill(trainer, 99)
    restored_manifest = manager.restore(state(trainer))
    first = next(v for n, v in values(trainer).items() if "kernel" in n)
    assert restored_manifest.step == trainer.step == int(first.flat[0])
    return restored_manifest.step


@pytest.mark.parametrize("name", list(MANAGERS))
def test_every_manager_follows_the_protocol(tmp_path, name, fresh):
    manager = MANAGERS[name](tmp_path / "none")
    assert isinstance(manager, ctl.CheckpointManager)
    fill(fresh, 7)
    before = values(fresh)
    assert manager.restore(state(fresh)) is None
    assert_same(before, values(fresh))
    with pytest.raises(ctl.CheckpointError, match="no (good )?checkpoint of step 5"):
        manager.restore(state(fresh), step=5)


@pytest.mark.parametrize("name", STORING_MANAGERS)
def test_a_state_is_restored_exactly(tmp_path, name, trained, fresh):
    manager = MANAGERS[name](tmp_path)
    expected = values(trained)
    for part in ("model/", "optimizer/", "mean_loss/", "seed", "step"):
        assert any(part in n for n in expected), f"no {part} in {list(expected)}"
    manager.save(state(trained), manifest(trained, 3, metrics={"loss": 0.1}, state={"a": [1]}))
    fill(fresh, 50)
    restored_manifest = manager.restore(state(fresh))
    assert_same(values(fresh), expected)
    assert restored_manifest.step == 3
    assert (restored_manifest.metrics, restored_manifest.state) == ({"loss": 0.1}, {"a": [1]})


@pytest.mark.parametrize("name", STORING_MANAGERS)
def test_the_newest_or_the_requested_step_is_restored(tmp_path, name, fresh):
    manager = MANAGERS[name](tmp_path)
    for step in (2, 10, 9, 30):
        fill(fresh, step)
        manager.save(state(fresh), manifest(fresh, step))
    assert restored_step(manager, fresh) == 30
    assert manager.restore(state(fresh), step=9).step == fresh.step == 9
    with pytest.raises(ctl.CheckpointError, match="step 2 in"):
        manager.restore(state(fresh), step=2)


@pytest.mark.parametrize("name", STORING_MANAGERS)
def test_another_model_is_refused_with_a_list_and_no_variable_is_restored(tmp_path, name, trained):
    manager = MANAGERS[name](tmp_path)
    manager.save(state(trained), manifest(trained, 3))
    other = prepared(hidden=5)
    before = values(other)
    with pytest.raises(ctl.CheckpointError, match="another model; no variable was restored") as raised:
        manager.restore(state(other))
    error_message = str(raised.value)
    assert "differs: model/" in error_message and "[8, 16]" in error_message and "[8, 5]" in error_message
    assert "not in this model: model/" in error_message and "seed" in error_message
    assert_same(before, values(other))


def test_missing_variables_are_listed_too(tmp_path, trained, fresh):
    manager = ctl.MemoryCheckpoints()
    small = prepared(trainer_class=Small)
    manager.save(state(small), manifest(small, 1))
    with pytest.raises(ctl.CheckpointError, match="missing in the checkpoint: mean_loss/"):
        manager.restore(state(fresh))


@pytest.mark.parametrize("save_on", [1, 2])
@pytest.mark.parametrize("name", some_of(STORING_MANAGERS, "chief_only"))
def test_two_replicas_and_one_device_read_each_other_s_states(tmp_path, name, save_on, two_replicas):
    manager = MANAGERS[name](tmp_path)
    strategies = ["default", two_replicas]
    writer, reader = (make_trainer(s) for s in (strategies if save_on == 1 else strategies[::-1]))
    writer.train(2)
    manager.save(state(writer), manifest(writer, 2))
    reader.prepare()
    manager.restore(state(reader))
    assert_same(values(reader), values(writer))
    for variable in state(reader).variables.values():
        parts = [v.numpy() for v in getattr(variable, "values", ())]
        if getattr(variable, "aggregation", None) != tf.VariableAggregation.SUM:
            assert all((p == parts[0]).all() for p in parts), "replicas differ"


@pytest.mark.parametrize("name", STORING_MANAGERS)
@pytest.mark.parametrize(
    ("keep", "losses", "kept_steps"),
    [
        (ctl.Keep(newest=2), [1, 2, 3, 4], [3, 4]),
        (ctl.Keep(newest=1), [1, 2, 3, 4], [4]),
        (ctl.Keep(newest=0), [1, 2, 3, 4], [1, 2, 3, 4]),
        (ctl.Keep(newest=1, best="loss"), [3, 1, 2, 4], [2, 4]),
        (ctl.Keep(newest=1, best="loss", mode="max"), [3, 5, 2, 4], [2, 4]),
        (ctl.Keep(newest=1, best="loss"), [float("nan"), 3, float("nan"), 4], [2, 4]),
        (ctl.Keep(newest=1, best="loss"), [float("nan")] * 4, [4]),
        (ctl.Keep(newest=1, best="accuracy"), [1, 2, 3, 4], [4]),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, name, keep, losses, kept_steps, fresh):
    manager = MANAGERS[name](tmp_path)
    manager.keep = keep
    for step, loss in enumerate(losses, 1):
        manager.save(state(fresh), manifest(fresh, step, metrics={"loss": float(loss)}))
    steps = manager.steps() if name == "chief_only" else sorted(manager._saved_by_step)
    assert steps == kept_steps


@pytest.mark.parametrize("text", ["", "x", "-1", "3,best", "3,worst=loss", "3,mode=most", "1.5"])
def test_a_wrong_string_for_keep_is_refused(text):
    with pytest.raises(ctl.UsageError, match="keep"):
        ctl.Keep.parse(text)


def test_strings_for_keep_are_parsed():
    assert ctl.Keep.parse("5") == ctl.Keep(newest=5)
    assert ctl.Keep.parse("3, best=mae, mode=max") == ctl.Keep(newest=3, best="mae", mode="max")


def test_plain_tensorflow_reads_a_checkpoint(tmp_path, trained):
    manager = ctl.ChiefOnlyCheckpoints(tmp_path)
    path = manager.save(state(trained), manifest(trained, 3))
    other = make_trainer()
    other.build()
    other.optimizer.build(other.model.trainable_variables)
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=other.model, optimizer=other.optimizer, step=step)
    checkpoint.read(f"{path}/state").expect_partial().assert_existing_objects_matched()
    for a, b in zip(other.model.weights, trained.model.weights, strict=True):
        np.testing.assert_array_equal(unwrap(a).numpy(), unwrap(b).numpy())
    for a, b in zip(other.optimizer.variables, trained.optimizer.variables, strict=True):
        np.testing.assert_array_equal(unwrap(a).numpy(), unwrap(b).numpy())
    assert step.numpy() == 3


def truncate(path):
    data = next(path.glob("state.data*"))
    data.write_bytes(data.read_bytes()[:-3])


def flip_bit(path):
    data = next(path.glob("state.data*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(bytes(content))


DAMAGES = {
    "truncated": truncate,
    "a bit flipped": flip_bit,
    "index missing": lambda path: (path / "state.index").unlink(),
    "manifest missing": lambda path: (path / "manifest.json").unlink(),
    "manifest cut short": lambda path: (path / "manifest.json").write_text('{"step": 3'),
    "manifest empty": lambda path: (path / "manifest.json").write_text(""),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_checkpoint_is_skipped_and_all_damaged_is_an_error(saved, fresh, damage):
    DAMAGES[damage](saved.directory / "ckpt-3")
    assert restored_step(saved, fresh) == 2
    for step in (1, 2):
        DAMAGES[damage](saved.directory / f"ckpt-{step}")
    before = values(fresh)
    with pytest.raises(ctl.CheckpointError, match=r"Every checkpoint .* is damaged .*ckpt-1"):
        saved.restore(state(fresh))
    assert_same(before, values(fresh))


def test_a_flipped_bit_in_a_manifest_makes_a_damaged_checkpoint(saved, fresh):
    path = saved.directory / "ckpt-3" / "manifest.json"
    content = json.loads(path.read_text())
    first = next(iter(content["files"]))
    content["files"][first] = {"sixe": 1, "checksum": "sha256:0"}  # "size" with a flipped bit
    path.write_text(json.dumps(content))
    assert restored_step(saved, fresh) == 2


def test_leftovers_are_deleted_and_no_other_files(saved, fresh):
    other_names = ["workertemp_x", "my-tmp-ckpt-1", "ckpt-best", "notes"]
    for name in ["tmp-ckpt-4", "workertemp_0", "workertemp_12", "tmp-ckpt-4_temp", *other_names]:
        (saved.directory / name).mkdir()
        (saved.directory / name / "file").touch()
    elsewhere = saved.directory.parent / "workertemp_1"
    elsewhere.mkdir()
    before = {p.name for p in saved.directory.iterdir()}
    assert restored_step(saved, fresh) == 3
    assert {p.name for p in saved.directory.iterdir()} == before  # another run may own the directory
    saved.begin(state(fresh), print)
    remaining_names = {p.name for p in saved.directory.iterdir()}
    assert remaining_names == {"ckpt-1", "ckpt-2", "ckpt-3", *other_names}
    assert elsewhere.exists()


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_no_files(tmp_path, saved, fresh, error):
    def write(prefix):
        with open(prefix + ".data", "w") as file:
            file.write("half")
        raise error

    with pytest.raises(type(error)):
        commit.write_checkpoint(saved.directory, manifest(fresh, 3), write)
    assert {p.name for p in saved.directory.iterdir()} == {"ckpt-1", "ckpt-2", "ckpt-3"}
    assert restored_step(saved, fresh) == 3


def test_a_step_saved_again_replaces_the_old_one(saved, fresh):
    fill(fresh, 3)
    saved.save(state(fresh), manifest(fresh, 3, metrics={"again": 1.0}))
    assert saved.restore(state(fresh)).metrics == {"again": 1.0}
    assert saved.steps() == [1, 2, 3]


def test_a_renamed_checkpoint_is_skipped(saved, fresh):
    shutil.move(saved.directory / "ckpt-3", saved.directory / "ckpt-7")
    assert restored_step(saved, fresh) == 2
