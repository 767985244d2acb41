"""Imported first, gives a worker two logical CPUs as replicas, as one with two GPUs would have them.

TensorFlow uses one CPU per worker; for tests its choice of devices is set aside.
"""

import ctl  # noqa: F401  hides TensorFlow's start-up lines
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy as strategies

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
strategies.CollectiveAllReduceExtended._initialize_local_devices = lambda self, resolver, device: (
    tuple(f"{device}/device:CPU:{i}" for i in range(2)), "CPU",
)  # fmt: skip
