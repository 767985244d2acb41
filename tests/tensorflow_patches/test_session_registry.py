"""Sessions are recorded when they run."""

import pytest
import tensorflow as tf
from ctl.tensorflow_patches import session_registry
from patching import parameters_of, restore_original, turn_off
from tensorflow.python.client import session


@pytest.fixture
def recorded(monkeypatch):
    """A list of the recorded sessions, and a function that runs a session."""
    assert parameters_of(restore_original(monkeypatch, session.BaseSession, "_extend_graph")) == ["self"]
    sessions = []

    def run():
        with tf.Graph().as_default(), tf.compat.v1.Session() as running:
            assert running.run(tf.constant(2)) == 2
            return running

    return sessions, run


def test_every_run_records_its_session(recorded):
    sessions, run = recorded
    session_registry.record_sessions(sessions.append)
    assert run() in sessions


def test_it_can_be_turned_off(recorded, monkeypatch):
    sessions, run = recorded
    turn_off(monkeypatch, "session_registry")
    session_registry.record_sessions(sessions.append)
    run()
    assert not sessions
