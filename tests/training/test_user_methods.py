"""Optional methods of a trainer: defaults, and which ones a subclass defines."""

import ctl
import pytest
from ctl.training.user_methods import UserMethods, is_defined_by_user

NAMES = [name for name in vars(UserMethods) if not name.startswith("_")]


@pytest.mark.parametrize("name", [*NAMES, "build", "train_data", "eval_step", "after_loop", "predict"])
def test_a_method_is_the_user_s_if_a_subclass_or_the_object_defines_it(name):
    def method(self, *arguments):
        return None

    inherits = type("Inherits", (ctl.Trainer,), {})
    for cls, expected in (
        (inherits, False),
        (type("Restores", (inherits,), {name: getattr(ctl.Trainer, name)}), False),
        (type("Defines", (inherits,), {name: method}), True),
        (type("Mixes", (type("Mixin", (), {name: method}), ctl.Trainer), {}), True),
        (type("Disables", (inherits,), {name: None}), False),
    ):
        assert is_defined_by_user(cls(strategy="default", writers=[]), name) == expected, cls
    trainer = inherits(strategy="default", writers=[])
    setattr(trainer, name, lambda *arguments: None)
    assert is_defined_by_user(trainer, name)


def test_methods_of_keras_trainer_count_as_defined():
    assert is_defined_by_user(object.__new__(ctl.KerasTrainer), "eval_step")


def test_the_defaults_return_no_signatures_and_no_averages():
    methods = UserMethods()
    assert methods.signatures() == {} and methods.moving_averages() is None
    with pytest.raises(NotImplementedError):
        methods.train_data_fn(None)


class Serves:
    """A mixin with an optional method."""

    def signatures(self):
        return {"serve": len}


def test_a_mixin_after_the_trainer_defines_optional_methods():
    class Mixed(ctl.Trainer, Serves):
        pass

    class Derived(Mixed):
        def after_epoch(self, epoch, step, means):
            return True

    trainer = Derived(strategy="default")
    assert trainer.signatures() == {"serve": len} and is_defined_by_user(trainer, "signatures")
    assert trainer.after_epoch(1, 1, {}) and not is_defined_by_user(trainer, "moving_averages")
