"""Observers of the training loop: calls, and values that are summed with the vote of the workers."""

import contextlib

import ctl
import pytest
from ctl.profiling.loop_observer import CompletedLoop, LoopObserver
from ctl.training import loop_observers
from ctl.training.observers import ObserverGroup
from small_models import Small, every_step

LOOP = CompletedLoop(step=5, num_steps=2, start=1.0, end=1.5, is_timed=True)


class Recording(LoopObserver):
    def __init__(self, name, calls, values=(), mark=None, is_slow=False):
        self.name, self.calls, self.values, self.mark, self.is_slow = name, calls, values, mark, is_slow

    def next_mark(self, step):
        return self.mark

    @contextlib.contextmanager
    def around(self, step):
        self.calls.append((self.name, "enters", step))
        yield self.is_slow
        self.calls.append((self.name, "leaves", step))

    def completed(self, loop):
        self.calls.append((self.name, loop))

    def values_to_sum(self):
        return self.values

    def take_sums(self, sums):
        self.calls.append((self.name, sums))

    def close(self):
        self.calls.append((self.name, "closes"))


def test_defaults_are_no_ops():
    observer = LoopObserver()
    assert observer.next_mark(1) is None and not observer.wants_report() and not observer.values_to_sum()
    with observer.around(1) as is_slowed:
        assert not is_slowed
    observer.completed(LOOP)
    observer.close()


def test_all_observers_are_called_in_their_order():
    calls = []
    group = ObserverGroup([Recording("a", calls, mark=9), Recording("b", calls, mark=7, is_slow=True)])
    assert group.next_mark(3) == 7 and ObserverGroup().next_mark(3) is None
    with group.around(3) as is_slowed:
        assert is_slowed
    group.completed(LOOP)
    with pytest.raises(KeyError), group.closing():
        raise KeyError
    names = [call[0] for call in calls]
    assert names == ["a", "b", "b", "a", "a", "b", "a", "b"]
    assert calls[-1] == ("b", "closes") and LOOP.secs == 0.5


def test_each_observer_receives_the_sums_of_its_values():
    calls = []
    first, last = Recording("a", calls, (1.0, 2.0)), Recording("b", calls, (3.0,))
    group = ObserverGroup([first, LoopObserver(), last])
    assert group.sum_over_workers([7.0], lambda values: [2 * v for v in values]) == [14.0]
    assert calls == [("a", [2.0, 4.0]), ("b", [6.0])]
    assert ObserverGroup().sum_over_workers([7.0], list) == [7.0]


def test_a_run_calls_an_observer_for_each_graph_call(monkeypatch):
    calls = []
    create = loop_observers.create_observers

    def with_another(*arguments, **options):
        group = create(*arguments, **options)
        return ObserverGroup([*group._observers, Recording("mine", calls, mark=None)])

    monkeypatch.setattr("ctl.training.run.create_observers", with_another)
    intervals = every_step(log=ctl.Every(), save=ctl.Every(), steps_per_loop=2)
    Small(strategy="default", writers=[], intervals=intervals).train(4)
    loops = [call[1] for call in calls if isinstance(call[1], CompletedLoop)]
    assert [(loop.step, loop.num_steps) for loop in loops] == [(2, 2), (4, 2)]
    assert calls[-1] == ("mine", "closes") and loops[0].end > loops[0].start


def test_one_line_registers_an_observer(monkeypatch):
    loops = []

    class Longest(LoopObserver):
        def completed(self, loop):
            loops.append(loop.step)

    run_inputs = []

    def create(inputs):
        run_inputs.append(inputs)
        return Longest()

    monkeypatch.setattr(loop_observers, "create_longest", create, raising=False)
    name = "ctl.training.loop_observers:create_longest"
    monkeypatch.setattr(loop_observers, "OPTIONAL", (*loop_observers.OPTIONAL, name))
    Small(strategy="default", writers=[], intervals=every_step(log=ctl.Every(), save=ctl.Every())).train(2)
    assert loops == [1, 2] and run_inputs[0].world.topology.num_workers == 1
