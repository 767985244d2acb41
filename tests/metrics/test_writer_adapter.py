"""Writers of users that do not inherit from `ctl.MetricWriter`."""

import ctl
import pytest
from ctl.errors import LeaseLostError
from ctl.metrics.adapter import as_writers, is_writer
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import Ended, RunEnd, Saved


class LikeWriter:
    def __init__(self):
        self.calls = []

    def write(self, step, values, run="train"):
        self.calls.append((step, dict(values), run))

    def note(self, event):
        self.calls.append(event)


class AbandonableWriter(LikeWriter):
    def abandon(self):
        self.calls.append("abandoned")


def test_an_object_with_both_methods_is_called_as_a_writer():
    wrapped, memory = LikeWriter(), ctl.MemoryWriter()
    (writer, unwrapped) = as_writers([wrapped, memory])
    assert unwrapped is memory and isinstance(writer, ctl.MetricWriter)
    writer.write(3, {"loss": 1.0}, "eval")
    writer.note(Saved(3, "ckpt-3"))
    assert wrapped.calls == [(3, {"loss": 1.0}, "eval"), Saved(3, "ckpt-3")]
    assert (writer.everywhere, writer.metric, writer.class_name) == (False, None, "LikeWriter")


def test_the_attributes_of_an_object_are_those_of_its_writer():
    wrapped = LikeWriter()
    wrapped.everywhere, wrapped.metric = True, "accuracy"
    (writer,) = as_writers([wrapped])
    assert writer.everywhere and writer.metric == "accuracy"


@pytest.mark.parametrize("candidate", [object(), "console", 5, None])
def test_other_objects_are_no_writers(candidate):
    assert not is_writer(candidate)
    assert is_writer(LikeWriter()) and is_writer(ctl.NullWriter())


def test_after_the_loss_of_the_lease_only_writers_that_cannot_be_abandoned_get_the_end(tmp_path):
    def raise_lease_lost():
        raise LeaseLostError("another job")

    without_abandon, abandonable, memory = LikeWriter(), AbandonableWriter(), ctl.MemoryWriter()
    file = ctl.JsonlWriter(tmp_path / "metrics.jsonl")
    group = WriterGroup([without_abandon, abandonable, memory, file], raise_lease_lost)
    with pytest.raises(LeaseLostError):
        group.write(1, {"loss": 1.0})
    end = Ended(1, RunEnd.FAILED)
    group.note(end)
    assert abandonable.calls == ["abandoned"] and without_abandon.calls == [end] and memory.events == [end]
    assert not [*tmp_path.iterdir()]


def test_a_failing_object_is_named_by_its_class(caplog):
    class Failing(LikeWriter):
        def write(self, step, values, run="train"):
            raise OSError("full")

    group = WriterGroup([Failing()])
    group.write(1, {})
    assert not group and "Failing failed and is not called again: OSError: full" in caplog.text
