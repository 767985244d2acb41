"""Functions that other processes import by name."""

import os
from pathlib import Path


def rank_and_arguments(*args, **kwargs):
    return int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"]), args, kwargs


def fails_on_rank_1():
    if os.environ["HOROVOD_RANK"] == "1":
        raise ValueError("no data here")
    import time

    time.sleep(1000)


def returns_an_unpicklable_value():
    return lambda: None


def fails_after_its_peer(path, rank):
    import time

    if int(os.environ["HOROVOD_RANK"]) != rank:
        Path(path).touch()
        raise type("HorovodInternalError", (RuntimeError,), {})("rank 1 is gone")
    deadline = time.monotonic() + 600
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    raise OSError("disk full")


def dies():
    os._exit(3)


def modes(directory):
    return [path.stat().st_mode & 0o777 for path in Path(directory).glob("ctl-run-*")]


def sum_of_steps(marker_path):
    """Sums 1 + 2 + 3 + 4 in a variable. The last rank of the first group dies in the third step."""
    import ctl.hvd as hvd
    import tensorflow as tf
    from ctl.hvd import elastic

    hvd.init()
    state = elastic.TensorFlowState([tf.Variable(0.0)], step=1)

    @elastic.run
    def train(state):
        while state.step <= 4:
            if state.step == 3 and hvd.rank() == 1 and hvd.size() == 2:
                Path(marker_path).touch()
                os._exit(3)
            state.variables[0].assign_add(hvd.allreduce(tf.constant(float(state.step)), name="a"))
            state.step += 1
            state.commit()
        return float(state.variables[0].numpy())

    return train(state)


def average(value):
    import ctl.hvd as hvd
    import tensorflow as tf

    hvd.init()
    return float(hvd.allreduce(tf.constant(value + hvd.rank())))
