"""Checks of arguments that have to be a trainer, or make one."""

import ctl
import keras
import pytest
from ctl import trainer_checks


class Trained(ctl.Trainer):
    """A trainer that is not built."""


class Other:
    """A class without the methods of a trainer."""


def trained():
    return Trained(strategy="default", global_batch_size=8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Trained, r"^f\(\) got the class Trained; expected an instance .*Write f\(Trained\("),
        (lambda: keras.Sequential([]), r"^f\(\) got a Sequential; .*Write ctl\.KerasTrainer\(model, "),
        (lambda: 3, r"^f\(\) got 3; expected an instance of ctl\.Trainer\.$"),
        (Other, r"^f\(\) got a Other; expected an instance of ctl\.Trainer\.$"),
    ],
    ids=["a class", "a model", "a number", "another object"],
)
def test_an_object_that_is_no_trainer_is_refused(make, message):
    with pytest.raises(ctl.UsageError, match=message):
        trainer_checks.check_instance("f", make())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (trained, r"^f\(\) got an instance of Trained; .*Write f\(Trained\), with the settings"),
        (lambda: Other, r"^f\(\) got the class Other; expected a subclass of ctl\.Trainer, or a function"),
        (lambda: keras.Sequential([]), r"^f\(\) got a Sequential; .*Write f\(lambda \*\*settings: ctl\."),
        (lambda: "Trained", r"^f\(\) got 'Trained'; .* or a function that returns a trainer\.$"),
        (lambda: None, r"^f\(\) got None; "),
    ],
    ids=["an instance", "another class", "a model", "a string", "None"],
)
def test_an_object_that_makes_no_trainer_is_refused(make, message):
    with pytest.raises(ctl.UsageError, match=message):
        trainer_checks.check_factory("f", make())


@pytest.mark.parametrize("result", [None, Trained, Other()], ids=["None", "a class", "another object"])
def test_a_function_that_returns_no_trainer_is_refused(result):
    with pytest.raises(ctl.UsageError, match=r"^f\(\) got a function that returned .*; expected an"):
        trainer_checks.check_result("f", result)


def test_trainers_their_classes_and_functions_are_accepted():
    trainer_checks.check_instance("f", trained())
    trainer_checks.check_result("f", trained())
    trainer_checks.check_factory("f", Trained)
    trainer_checks.check_factory("f", trained)
