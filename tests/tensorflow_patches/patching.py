"""Helpers of the tests of `ctl/tensorflow_patches`."""

import inspect

from ctl.tensorflow_patches import switches


def restore_original(monkeypatch, owner, name):
    """Restores the function of TensorFlow or Keras until the end of the test; returns it."""
    original = inspect.unwrap(getattr(owner, name))
    monkeypatch.setattr(owner, name, original)
    return original


def parameters_of(function):
    """Returns the names of the parameters of a function."""
    return list(inspect.signature(function).parameters)


def turn_off(monkeypatch, name):
    """Turns off a patch until the end of the test."""
    monkeypatch.setenv(switches.VARIABLE, name)
