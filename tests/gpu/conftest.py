"""Device of the tests in this folder: the first GPU, or the one that CTL_TEST_DEVICE names.

`CTL_TEST_DEVICE=cpu:1` runs the same tests on a logical CPU. This shows that the tests themselves work.
"""

import os

import pytest
import tensorflow as tf

DEVICE_VARIABLE = "CTL_TEST_DEVICE"


def pytest_collection_modifyitems(items):
    has_device = bool(os.environ.get(DEVICE_VARIABLE) or tf.config.list_physical_devices("GPU"))
    for item in items:
        if "tests/gpu/" in item.path.as_posix() and not has_device:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; make test-gpu"))


@pytest.fixture(scope="session")
def device():
    """Name of the device for `ctl.make_strategy`, such as "gpu:0"."""
    return os.environ.get(DEVICE_VARIABLE, "gpu:0")


@pytest.fixture(scope="session")
def device_type(device):
    """Type of the device in TensorFlow's names, such as "GPU"."""
    return device.partition(":")[0].upper()
