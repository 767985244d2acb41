"""Devices of this process and their names in settings."""

import tensorflow as tf
from ctl.errors import UsageError
from ctl.setting_values import check_integer


def split_cpu(count: int) -> None:
    """Creates `count` logical CPU devices. Raises UsageError if TensorFlow has already started."""
    count = check_integer("num_virtual_devices", count, 0)
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        )
    except RuntimeError:
        if len(tf.config.list_logical_devices("CPU")) != count:
            raise UsageError(
                f"num_virtual_devices={count} was set after TensorFlow had started. Create the strategy "
                "before the first tensor; move tensors and datasets from the top of the file into "
                "build() and train_data()."
            ) from None


def device(text: str) -> str:
    """Returns TensorFlow's name of a device such as "gpu:1". Raises UsageError if it does not exist."""
    have = tf.config.list_logical_devices()
    device_type, _, index = text.strip().lower().removeprefix("/").removeprefix("device:").partition(":")
    for device in have:
        if device.device_type.lower() == device_type and device.name.endswith(f":{index or 0}"):
            return f"/device:{device.device_type}:{index or 0}"
    names = ", ".join(":".join(d.name.split(":")[-2:]).lower() for d in have)
    raise UsageError(
        f"device {text!r} does not exist here; this process has {names}. For several logical CPUs "
        "give num_virtual_devices."
    )


def best_device() -> str:
    """Returns the first GPU, or the CPU if there is no GPU."""
    return "/device:GPU:0" if tf.config.list_logical_devices("GPU") else "/device:CPU:0"
