"""Processes of the tests on a GPU. Each prints one line of JSON.

    python tests/gpu/programs.py memory|allreduce DEVICE
"""

import json
import os
import sys

import ctl
import tensorflow as tf
from small_models import Small


def memory(device: str) -> dict:
    """Trains with memory growth. Returns the largest number of bytes in use, or None on a CPU."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    if device.startswith("cpu"):
        ctl.make_strategy("mirrored", num_virtual_devices=2)
    trainer = Small(strategy=ctl.make_strategy("one_device", devices=[device]), writers=[])
    trainer.train(5)
    is_gpu = device.startswith("gpu")
    peak = tf.config.experimental.get_memory_info(device.upper())["peak"] if is_gpu else None
    return {"step": trainer.step, "peak_bytes": peak}


def allreduce(device: str) -> dict:
    """Sums and gathers tensors of the device. Two ranks share one GPU, so its memory has to grow."""
    import ctl.hvd as hvd

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    hvd.init()
    with tf.device(device if device.startswith("gpu") else "cpu:0"):
        values = tf.constant([1.0, 2.0]) * (hvd.rank() + 1)
        total, gathered = hvd.allreduce(values, op=hvd.Sum), hvd.allgather(values)
        doubled = total + 0.0
    kind = device.partition(":")[0].upper()
    return {
        "sum": total.numpy().tolist(),
        "gathered": gathered.numpy().tolist(),
        "on_device": kind in doubled.device.upper(),
    }


if __name__ == "__main__":
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    print(json.dumps({"memory": memory, "allreduce": allreduce}[sys.argv[1]](sys.argv[2])))
