"""Unchanged programs that import horovod."""

import sys
from pathlib import Path

import processes
import pytest
from conftest import environment
from hvd.ranks import results, run_ranks

SCRIPT = """
import ctl.hvd.as_horovod
import json
import horovod
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as keras_hvd
import horovod.keras.callbacks
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import allgather, size
from horovod.common.util import gpu_available, is_version_greater_equal_than
import perseus.tensorflow.horovod as vendor
import perseus.tensorflow.horovod.keras as vendor_keras
from perseus.tensorflow.horovod.keras.callbacks import MetricAverageCallback
from horovod.tensorflow.util import _executing_eagerly
import tensorflow as tf

hvd.init()
assert HorovodInternalError is hvd.HorovodInternalError and horovod.run is hvd.run
assert keras_hvd.callbacks.MetricAverageCallback is horovod.keras.callbacks.MetricAverageCallback
assert vendor is hvd and vendor_keras is keras_hvd and hvd.mpi_ops is hvd
assert MetricAverageCallback is keras_hvd.callbacks.MetricAverageCallback
assert is_version_greater_equal_than("2.10.0", "2.9.1")
assert not is_version_greater_equal_than("2.9.1", "2.10.0")
total = hvd.allreduce(tf.constant(1.0), op=hvd.Sum, compression=Compression.fp16)
print(json.dumps({"total": float(total), "size": size()}))
"""


def test_horovod_s_modules_are_ours():
    assert results(SCRIPT, 2) == [{"total": 2.0, "size": 2}] * 2


OLD_SPELLINGS = """
import ctl.hvd.as_horovod
import json
import horovod.tensorflow.keras as hvd
import numpy as np, tensorflow as tf

hvd.init()
tf.keras.utils.set_random_seed(hvd.rank())
model = tf.keras.Sequential([tf.keras.layers.Input([4]), tf.keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1 * hvd.size(), momentum=0.9))
model.compile(optimizer=optimizer, loss="mse", experimental_run_tf_function=False)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(np.ones([8, 4]), np.ones([8, 1]), batch_size=4, verbose=0, callbacks=callbacks)
before = float(model.optimizer.lr)
model.optimizer.lr = 0.25
print(json.dumps({
    "lr": [round(before, 3), float(model.optimizer.learning_rate)],
    "variables": [len(optimizer.variables()), len(optimizer.variables)],
}))
"""


def test_three_spellings_of_keras_2_are_understood():
    result_by_rank = results(OLD_SPELLINGS, 2)
    assert result_by_rank[0] == result_by_rank[1] and result_by_rank[0]["lr"] == [0.2, 0.25]
    count, same = result_by_rank[0]["variables"]
    assert count == same >= 4


def test_a_real_horovod_is_not_hidden(tmp_path):
    (tmp_path / "horovod.py").write_text("")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport ctl.hvd.as_horovod"
    ((code, _, err),) = run_ranks(script, 1)
    assert code != 0 and "UsageError" in err and "uninstall it" in err


UNCHANGED = """
import {vendor}.tensorflow{more} as hvd
import tensorflow as tf

hvd.init()
total = hvd.allreduce(tf.constant(float(hvd.rank())), op=hvd.Sum)
with open("{path}." + str(hvd.rank()), "w") as file:
    file.write(str(float(total)) + " " + hvd.__name__)
"""


@pytest.mark.parametrize(
    ("vendor", "submodule", "command"),
    [("horovod", "", ["ctlrun", "--as-horovod"]), ("perseus", ".horovod", ["perseusrun"]),
     ("horovod", "", ["perseusrun"])],
)  # fmt: skip
def test_programs_of_horovod_start_unchanged(tmp_path, vendor, submodule, command):
    program, path = tmp_path / "train.py", tmp_path / "out"
    program.write_text(UNCHANGED.format(vendor=vendor, more=submodule, path=path))
    script = str(Path(sys.executable).parent / command[0])
    result = processes.run(
        [script, *command[1:], "-np", "2", sys.executable, str(program)], env=environment(), cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout
    assert [Path(f"{path}.{rank}").read_text() for rank in (0, 1)] == ["1.0 ctl.hvd"] * 2
