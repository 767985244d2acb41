"""Event methods of subclasses of `ctl.Callback` and of objects that resemble one."""

import ctl
import pytest
from ctl.callbacks.adapter import as_callbacks

EVENTS = ["on_metrics", "on_begin", "before_training", "after_epoch", "after_evaluation"]


@pytest.mark.parametrize("event", EVENTS)
def test_the_handlers_of_a_callback_are_its_overridden_methods(event):
    def handle(self, *arguments):
        return None

    inherits = type("Inherits", (ctl.Callback,), {event: handle})()
    replaced = ctl.Callback()
    setattr(replaced, event, handle)
    resembles = type("Resembles", (), {event: handle})()
    for callback in as_callbacks([inherits, resembles]):
        assert [*callback.handlers()] == [event]
    assert [*replaced.handlers()] == [event] and not ctl.Callback().handlers()


def test_an_object_with_event_methods_is_called_as_a_callback():
    class Resembles:
        name, restore_best, rollback, stopped_at = "mine", True, True, None

        def __init__(self):
            self.state = {"count": 1}

        def on_metrics(self, step, values, run):
            return ctl.Decision(stop=True)

    wrapped = Resembles()
    inherits = ctl.EarlyStopping("loss")
    (callback, second) = as_callbacks((wrapped, inherits))
    assert second is inherits and isinstance(callback, ctl.Callback)
    assert (callback.name, callback.class_name) == ("mine", "Resembles")
    assert callback.restore_best and callback.rollback and callback.monitored is None
    assert callback.handlers()["on_metrics"](1, {}, "eval").stop and not callback.has_stopped()
    callback.state, wrapped.stopped_at = {"count": 2}, 7
    assert wrapped.state == callback.state == {"count": 2} and callback.has_stopped()


def test_objects_without_a_name_or_a_state_have_their_defaults():
    class Resembles:
        def after_epoch(self, trainer, epoch, step, means):
            pass

    (callback,) = as_callbacks([Resembles()])
    assert (callback.name, callback.state, callback.restore_best) == ("Resembles", None, False)
