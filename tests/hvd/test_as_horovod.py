"""Code that says `import horovod`, unchanged."""

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
from horovod.common.util import gpu_available
from horovod.tensorflow.util import _executing_eagerly
import tensorflow as tf

hvd.init()
assert HorovodInternalError is hvd.HorovodInternalError and horovod.run is hvd.run
assert keras_hvd.callbacks.MetricAverageCallback is horovod.keras.callbacks.MetricAverageCallback
total = hvd.allreduce(tf.constant(1.0), op=hvd.Sum, compression=Compression.fp16)
print(json.dumps({"total": float(total), "size": size()}))
"""


def test_horovod_s_modules_are_ours():
    assert results(SCRIPT, 2) == [{"total": 2.0, "size": 2}] * 2


def test_a_real_horovod_is_not_hidden(tmp_path):
    (tmp_path / "horovod.py").write_text("")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport ctl.hvd.as_horovod"
    ((code, _, err),) = run_ranks(script, 1)
    assert code != 0 and "UsageError" in err and "uninstall it" in err
