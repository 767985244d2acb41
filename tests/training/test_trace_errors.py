"""Errors of the trace of a step, which all workers have."""

import ctl
import pytest
import tensorflow as tf
from ctl.io import error_report
from ctl.training.graph_loop import errors_of_a_trace

BATCH = {"image": tf.TensorSpec([None, 2])}


@pytest.mark.parametrize("spec", [BATCH, (BATCH, tf.TensorSpec([]))])  # with the number of real rows
def test_an_explained_error_names_the_keys_and_is_common_to_all_workers(spec):
    message = r"batch\[0\].*the keys 'image'"
    with pytest.raises(ctl.UsageError, match=message) as raised, errors_of_a_trace(spec):
        raise KeyError(0)
    assert error_report.is_common(raised.value)


def test_another_error_stays_with_a_note_about_the_batch():
    with pytest.raises(KeyError) as raised, errors_of_a_trace(BATCH):
        raise KeyError("label")
    assert error_report.is_common(raised.value)
    assert "The batch is" in raised.value.__notes__[0]


def test_an_error_of_ctl_is_raised_unchanged():
    error = ctl.UsageError("loss is missing")
    with pytest.raises(ctl.UsageError) as raised, errors_of_a_trace(BATCH):
        raise error
    assert raised.value is error and error_report.is_common(error)
