"""Arguments of wrong types are refused where they are given, with UsageError."""

import inspect
from dataclasses import dataclass, field
from pathlib import Path

import ctl
import numpy as np
import pytest
import tensorflow as tf
from small_models import Small

VALID_ARGUMENTS = {
    "BackupCheckpoints": {"directory": "run"},
    "ChiefOnlyCheckpoints": {"directory": "run"},
    "Decision": {},
    "EarlyStopping": {"metric": "loss"},
    "Every": {},
    "Gradients": {},
    "Intervals": {},
    "JsonlWriter": {"path": "m.jsonl"},
    "Keep": {},
    "LossSpike": {},
    "MemoryCheckpoints": {},
    "ReduceOnPlateau": {"metric": "loss"},
    "SaveBest": {"metric": "loss"},
    "TensorBoardWriter": {"logs_dir": "logs"},
    "example_numbers": {"batch_size": 2},
    "from_arrays": {"arrays": np.zeros((4, 2)), "batch_size": 2},
    "from_source": {"source": [1, 2, 3], "batch_size": 2},
    "make_strategy": {"name": "one_device"},
    "scale_learning_rate": {"learning_rate": 0.1, "num_replicas": 2},
    "shard": {"dataset": tf.data.Dataset.range(4), "policy": "data"},
}
INVALID_ARGUMENTS = [
    ("ChiefOnlyCheckpoints", {"directory": None}, "path is None; expected a string or a path"),
    ("ChiefOnlyCheckpoints", {"keep": 3}, "keep is 3; expected a ctl.Keep"),
    ("EarlyStopping", {"baseline": "0.1"}, "EarlyStopping baseline is '0.1'; expected a number or None"),
    ("EarlyStopping", {"start_from": None}, "start_from is None; expected an integer"),
    ("EarlyStopping", {"patience": -1}, "patience is -1; expected a whole number >= 0"),
    ("EarlyStopping", {"restore_best": "yes"}, "restore_best is 'yes'; expected True or False"),
    ("EarlyStopping", {"min_delta": np.nan}, "min_delta is nan; expected a number"),
    ("EarlyStopping", {"mode": "lower"}, "mode is 'lower'; expected 'max', 'min' or 'auto'"),
    ("Gradients", {"merge_rows": "no"}, "Gradients merge_rows is 'no'; expected True or False"),
    ("Gradients", {"on_nonfinite": "ignore"}, "expected 'stop', 'skip' or 'rollback'"),
    ("JsonlWriter", {"path": 0}, "path is 0; expected a string or a path"),
    ("Keep", {"best": 1}, "Keep best is 1; expected a string or None"),
    ("Keep", {"newest": 1.5}, "Keep newest is 1.5; expected an integer"),
    ("LossSpike", {"metric": 1}, "LossSpike metric is 1; expected a string"),
    ("LossSpike", {"factor": True}, "LossSpike factor is True; expected a number"),
    ("MemoryCheckpoints", {"keep": "3"}, "keep is '3'; expected a ctl.Keep"),
    ("ReduceOnPlateau", {"factor": "0.1"}, "ReduceOnPlateau factor is '0.1'; expected a number"),
    ("ReduceOnPlateau", {"min_learning_rate": None}, "min_learning_rate is None; expected a number"),
    ("SaveBest", {"formats": None}, "SaveBest formats is None; expected a list of names"),
    ("TensorBoardWriter", {"queue_size": 0}, "queue_size is 0; expected a whole number >= 1"),
    ("from_arrays", {"shuffle": "False"}, "shuffle is 'False'; expected True or False"),
    ("from_arrays", {"batch_size": "2"}, "batch_size is '2'; expected a whole number >= 1"),
    ("from_source", {"seed": "a"}, "seed is 'a'; expected an integer or None"),
    ("from_source", {"transform": "f"}, "transform is 'f'; expected a function or None"),
    ("make_strategy", {"devices": "cpu:0"}, "devices is 'cpu:0'; expected a list of names"),
    ("make_strategy", {"topology": "ps"}, "topology is 'ps'; expected a ctl.Topology or None"),
    ("scale_learning_rate", {"learning_rate": "1"}, "learning_rate is '1'; expected a number"),
]
VALUES = [None, "x", -1, 0, 1.5, True, np.nan, [], {}, object(), int, b"x", (1,), np.float32(1)]


@pytest.mark.parametrize(("name", "arguments", "message"), INVALID_ARGUMENTS)
def test_an_argument_of_a_wrong_type_is_named_with_the_expected_type(name, arguments, message):
    with pytest.raises(ctl.UsageError, match=message):
        getattr(ctl, name)(**{**VALID_ARGUMENTS[name], **arguments})


@pytest.mark.parametrize("name", VALID_ARGUMENTS)
def test_no_value_of_an_argument_raises_another_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function, num_refused = getattr(ctl, name), 0
    for parameter in inspect.signature(function).parameters:
        for value in VALUES:
            try:
                function(**{**VALID_ARGUMENTS[name], parameter: value})
            except ctl.UsageError:
                num_refused += 1
    assert num_refused > 5


@pytest.mark.parametrize(("arguments", "message"), [
    ({"callbacks": ctl.EarlyStopping("loss")}, r"expected a list, e.g. \[ctl.EarlyStopping\('loss'\)\]"),
    ({"callbacks": None}, "callbacks is None; expected a list"),
    ({"callbacks": "history"}, "callbacks is 'history'; expected a list"),
    ({"intervals": 100}, "intervals is 100; expected a ctl.Intervals or None"),
    ({"strategy": 2}, "strategy is 2; expected a tf.distribute.Strategy, or one of auto, default"),
    ({"keep": "best"}, "keep is 'best'; expected a number of checkpoints"),
])  # fmt: skip
def test_a_trainer_refuses_objects_of_other_types(arguments, message):
    with pytest.raises(ctl.UsageError, match=message):
        Small(**arguments)


@pytest.mark.parametrize("value", [None, 1, [1], object()])
def test_formats_of_another_type_are_refused_before_the_training(value):
    trainer = Small()
    for call in (lambda: trainer.train(1, export=value), lambda: trainer.export(value, directory="out")):
        with pytest.raises(ctl.UsageError, match="export is .*; expected a list of names"):
            call()
    assert trainer.step == 0


def test_one_format_may_be_given_without_a_list(tmp_path):
    trainer = Small(model_dir=str(tmp_path))
    trainer.train(1, export="weights")
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["model.weights.h5"]


def test_fields_of_a_subclass_may_have_other_annotations():
    @dataclass(eq=False)
    class Own(ctl.EarlyStopping):
        steps: list[int] = field(default_factory=list)
        text: "str" = ""
        limit: float = 1.0

    assert Own("loss", steps=[1], text=2).steps == [1]
    with pytest.raises(ctl.UsageError, match="Own limit is '1'; expected a number"):
        Own("loss", limit="1")


def test_values_of_numpy_and_other_forms_of_a_value_are_accepted():
    callback = ctl.EarlyStopping("loss", patience=np.int64(3), restore_best=np.bool_(True))
    assert callback.restore_best and ctl.Keep(newest=np.int32(3)) == ctl.Keep(newest=3)
    best = ctl.SaveBest("loss", formats="keras", directory=Path("best"))
    assert best.formats == ("keras",) and best.directory == Path("best")
    assert ctl.Gradients(wire_dtype=tf.bfloat16) == ctl.Gradients(wire_dtype="bfloat16")
