"""A worker with two logical CPUs as replicas, as a worker with two GPUs would have them.

TensorFlow uses one CPU per worker; for this test its choice of devices is set aside.
"""

import sys

import compare
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy as strategies

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
strategies.CollectiveAllReduceExtended._initialize_local_devices = lambda self, resolver, device: (
    tuple(f"{device}/device:CPU:{i}" for i in range(2)), "CPU",
)  # fmt: skip
compare.main("multi_worker", int(sys.argv[1]))
