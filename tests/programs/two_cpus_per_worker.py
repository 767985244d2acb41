"""Two logical CPUs as replicas of a worker, as with two GPUs. Must be imported first.

TensorFlow uses one CPU per worker; this module replaces its selection of devices.
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
