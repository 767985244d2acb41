"""Exit codes of scripts that use `ctl` without `ctl.run`."""

import bz2
import gzip
import lzma
import subprocess
import sys
import tarfile
import zipfile

import processes
import pytest
from conftest import TIMEOUT_SECS, environment

STARTUP = ("cuInit", "Unable to register")  # in startup messages of TensorFlow

SCRIPT = """
import atexit
import ctl
from ctl.io import exit_hook
exit_hook.install_exit_hook()
exit_hook.install_exit_hook()
atexit.register(lambda: print("tidied up"))
print("first")
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code", "tidied"),
    [
        ("ctl.UsageError('a wrong flag')", 2, True),
        ("ctl.NonFiniteError('NaN')", 1, True),
        ("ctl.PeerLostError('worker 1 is gone')", 134, False),
        ("ctl.Stopped('by SIGTERM', 143)", 143, True),
        ("ValueError('not ours')", 1, True),
    ],
)
def test_an_uncaught_error_ends_the_process_with_its_exit_code(error, code, tidied):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(error=error)], env=environment(), capture_output=True,
        text=True, timeout=TIMEOUT_SECS, check=False,
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    assert result.stdout == "first\n" + "tidied up\n" * tidied
    if code != 143:
        assert error.partition("'")[2].rstrip("')") in result.stderr


def run_script(script: str, *arguments: str, start=subprocess.run) -> subprocess.CompletedProcess:
    return start(
        [sys.executable, "-c", script, *arguments], env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_SECS,
    )  # fmt: skip


EXIT = """
import atexit, gc, sys, threading, time
from ctl.io import exit_hook
atexit.register(lambda: print("first registered"))
file = open(sys.argv[1], "w")
file.write("not yet flushed")
threading.Thread(target=lambda: (time.sleep(0.3), print("a thread ends"))).start()
class Late:
    def __del__(self): print("torn down")      # skipped: no object is destroyed
late = Late()
{raises}
"""


def test_exit_runs_exit_functions_flushes_files_and_destroys_no_object(tmp_path):
    result = run_script(EXIT.format(raises="gc.freeze(); raise exit_hook.Exit(7)"), str(tmp_path / "file"))
    assert (result.returncode, result.stdout) == (7, "a thread ends\nfirst registered\n"), result.stderr
    assert (tmp_path / "file").read_text() == "not yet flushed"


def test_exit_that_is_caught_has_no_effect(tmp_path):
    catch_exit = "try: raise exit_hook.Exit(7)\nexcept SystemExit as e: print(e.code)\nsys.exit(3)"
    result = run_script(EXIT.format(raises=catch_exit), str(tmp_path / "file"))
    assert result.returncode == 3 and "torn down" in result.stdout


FILES = """
import bz2, gzip, io, lzma, os, pathlib, sys, tarfile, zipfile
from ctl.io import exit_hook
os.chdir(sys.argv[1])
files = [open("x", "wb"), gzip.open("x.gz", "wb"), bz2.open("x.bz2", "wb"), lzma.open("x.xz", "wb")]
for file in files: file.write(b"all")
text = io.TextIOWrapper(gzip.open("text.gz", "wb"))
text.write("all")
archive = zipfile.ZipFile("x.zip", "w")
archive.writestr("member", b"all")
tar = tarfile.open("x.tar.gz", "w:gz")
tar.addfile(tarfile.TarInfo("member"))

class Upload(io.RawIOBase):
    data = b""
    def writable(self): return True
    def write(self, data): self.data += bytes(data); return len(data)
    def close(self):
        if not self.closed: pathlib.Path("uploaded").write_bytes(self.data)
        super().close()

uploads = io.TextIOWrapper(io.BufferedWriter(Upload()))
uploads.write("all")
raise exit_hook.Exit(0)
"""


def test_exit_closes_files_that_write_their_last_part_on_close(tmp_path):
    assert run_script(FILES, str(tmp_path)).returncode == 0
    for name in ("x", "uploaded"):
        assert (tmp_path / name).read_bytes() == b"all"
    for name, packer in (("x.gz", gzip), ("text.gz", gzip), ("x.bz2", bz2), ("x.xz", lzma)):
        assert packer.decompress((tmp_path / name).read_bytes()) == b"all", name
    assert zipfile.ZipFile(tmp_path / "x.zip").read("member") == b"all"
    with tarfile.open(tmp_path / "x.tar.gz") as tar:
        assert tar.getnames() == ["member"]


IN_USE = """
import os, sys, threading, time
from ctl.io import exit_hook
exit_hook._FLUSH_SECS = float(sys.argv[2])
empty, full = os.fdopen(os.pipe()[0]), os.fdopen(os.pipe()[1], "wb")
uses = {"reads": empty.readline, "writes": lambda: full.write(bytes(2**20))}
threading.Thread(target=uses[sys.argv[1]], daemon=True).start()
time.sleep(0.3)                            # until the thread blocks
print("summary")
raise exit_hook.Exit(0)
"""


@pytest.mark.parametrize(("use", "secs"), [("reads", 1000), ("writes", 0.5)])
def test_exit_does_not_wait_for_a_thread_that_uses_a_file(use, secs):
    result = run_script(IN_USE, use, str(secs))
    assert (result.returncode, result.stdout) == (0, "summary\n"), result.stderr


TORN_DOWN = """
import ctypes, os, sys, types
from ctl.io import exit_hook
exit_hook.install_exit_hook()
library = ctypes.CDLL(None)
library.on_exit(library.abort, None)      # replaces TensorFlow's destructors

class Late:
    def __init__(self, name): self.name = name
    def __del__(self, write=os.write): write(1, self.name)

kept = Late(b"kept")
exit_hook.keep_alive(lambda: [kept], pause=lambda: None)
sys.modules["tensorflow.python.eager.context"] = types.SimpleNamespace(_context=Late(b"context"))
sys.exit(5)
"""


def test_a_script_that_ends_normally_destroys_neither_kept_objects_nor_tensorflow():
    result = run_script(TORN_DOWN)
    assert (result.returncode, result.stdout) == (5, ""), result.stderr


PIPELINES = """
import sys, time
import ctl
import tensorflow as tf
from ctl.data.batches import Batches
from ctl.io import exit_hook
exit_hook.install_exit_hook()

def numbers():
    while True: yield 1.0

auto = {"num_parallel_calls": tf.data.AUTOTUNE}
pipelines = [
    tf.data.Dataset.range(10**9).map(lambda x: x + 1, **auto),
    tf.data.Dataset.range(10**9).interleave(tf.data.Dataset.range, cycle_length=4, **auto),
    tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([])).map(tf.abs, **auto),
]
held = []
for dataset in pipelines:
    iterator = iter(dataset.prefetch(tf.data.AUTOTUNE))
    held.append(Batches(iterator, None, False, None, "skip", ""))
    for _ in range(1000): next(iterator)
sys.exit(5)
"""


def test_a_script_with_open_pipelines_ends_with_its_code_and_without_output():
    result = run_script(PIPELINES)
    stderr_lines = [line for line in result.stderr.splitlines() if not any(w in line for w in STARTUP)]
    assert (result.returncode, stderr_lines) == (5, [])


USER_ITERATORS = """
import gc, os, sys
import ctl
import tensorflow as tf
from ctl.io import exit_hook

class Late:
    def __init__(self, name): self.name = name
    def __del__(self, write=os.write): write(1, b"destroyed " + self.name.encode() + b"\\n")

marked_ids = set()
def mark_handles(name, value):
    for tensor in gc.get_objects():               # the handles created since the last call
        is_handle = type(tensor).__name__ == "EagerTensor" and tensor.dtype == tf.resource
        if is_handle and id(tensor) not in marked_ids:
            marked_ids.add(id(tensor))
            tensor.marker = Late(name)
    return value

def opened():
    return iter(data.map(lambda x: x + 1, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE))

def numbers():
    iterator = mark_handles("generator", opened())
    while True: yield next(iterator)

def taking():
    iterator = opened()
    return mark_handles("function", tf.function(lambda: next(iterator)).get_concrete_function())

gc.disable()
data = tf.data.Dataset.range(10**9)
module = mark_handles("module", opened())
generator = numbers()
next(generator)
strategy = tf.distribute.MirroredStrategy(["CPU:0"])
distributed = mark_handles("distributed", iter(strategy.experimental_distribute_dataset(data.batch(4))))
function = taking()
cycle = [mark_handles("cycle", opened())]
cycle.append(cycle)
del cycle
if sys.argv[1] == "frozen": gc.freeze()
if sys.argv[1] != "bare": exit_hook.install_exit_hook()
sys.exit(5)
"""


def destroyed_iterators(mode):
    result = run_script(USER_ITERATORS, mode)
    assert result.returncode == 5, result.stderr
    return set(result.stdout.splitlines())


def test_iterators_of_a_script_are_not_destroyed_when_it_ends():
    """tf.data's destructor waits for its autotuning thread, which may sleep for a minute."""
    names = ("module", "generator", "distributed", "function", "cycle")
    assert destroyed_iterators("bare") == {f"destroyed {name}" for name in names}, "no hook is installed"
    assert destroyed_iterators("installed") == set()


@pytest.mark.slow
def test_iterators_hidden_from_the_garbage_collector_are_not_destroyed():
    assert destroyed_iterators("frozen") == set()


DESTROYED = """
import os, threading
import ctl, tensorflow as tf
from ctl.data.batches import Batches
from ctl.io import exit_hook
exit_hook.install_exit_hook()

class Iterator:
    def __del__(self, write=os.write, thread=threading.current_thread):
        write(1, b"destroyed by ")            # later calls may fail at the end of the process
        write(1, thread().name.encode())
        destroyed.set()

destroyed = threading.Event()
dropped, held = (Batches(Iterator(), None, False, None, "skip", "") for _ in range(2))
del dropped
destroyed.wait(600)
"""


def test_an_iterator_is_destroyed_by_a_separate_thread_or_never():
    """tf.data's destructor may block for as long as the pipeline has run."""
    assert run_script(DESTROYED, start=processes.run).stdout == "destroyed by ctl-destroy"


HALF_DESTROYED = """
import os, threading, time
import ctl, tensorflow as tf
from ctl.data.batches import Batches
from ctl.io import exit_hook
exit_hook.install_exit_hook()

class Iterator:
    def __del__(self, write=os.write, sleep=time.sleep):
        started.set()
        sleep(SECS)
        write(1, b"destroyed")

started = threading.Event()
dropped = Batches(Iterator(), None, False, None, "skip", "")
del dropped
started.wait(600)
"""


@pytest.mark.parametrize("secs", [1, pytest.param(11, marks=pytest.mark.slow)])
def test_the_interpreter_does_not_end_while_an_iterator_is_being_destroyed(secs):
    """A thread that returns from native code would abort the process."""
    result = run_script(HALF_DESTROYED.replace("SECS", str(secs)), start=processes.run)
    assert result.stdout == "destroyed"


def test_an_error_waits_for_threads_and_a_printed_error_does_not_end_the_script():
    script = """
import sys, threading, time
from ctl.io import exit_hook
exit_hook.install_exit_hook()
try: raise ValueError("shown")
except ValueError: sys.excepthook(*sys.exc_info())
was_printed = threading.Event()
threading.Thread(target=lambda: (was_printed.wait(), time.sleep(0.3), print("a thread ends"))).start()
print("continues")
was_printed.set()
raise KeyError("the end")
"""
    result = run_script(script)
    assert (result.returncode, result.stdout) == (1, "continues\na thread ends\n")
    assert "shown" in result.stderr and "the end" in result.stderr


LATE = """
import sys, threading, time
import ctl, keras, numpy as np, tensorflow as tf
from ctl.data.batches import Batches

class First(ctl.Trainer):
    def build(self):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.01)
    def train_data(self, batch_size):
        return tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([3])).batch(batch_size)
    def train_step(self, batch):
        with tf.GradientTape() as tape:
            losses = self.model(batch, training=True)[:, 0] ** 2
            loss = self.average(losses)
        self.minimize(loss, tape)
        return {"loss": losses}

def rows():
    while True:
        yield from np.ones((32, 3), np.float32)
        started.set()
        threading.main_thread().join()

def train():
    trainer.train(20)
    iterator = iter(tf.data.Dataset.range(9))
    dropped = Batches(iterator, None, False, None, "skip", "")
    del dropped, iterator
    time.sleep(3)                       # the iterator is due for destruction
    print("the thread ends")

trainer = First(model_dir=sys.argv[1], global_batch_size=8, save_every_steps=5, background_save=True)
started = threading.Event()
threading.Thread(target=train).start()
started.wait(600)
"""


@pytest.mark.slow
def test_a_thread_trains_and_saves_after_the_end_of_the_main_thread(tmp_path):
    """Python 3.12 starts no threads then."""
    result = run_script(LATE, str(tmp_path))
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "the thread ends"), result.stderr
    assert "Exception in thread" not in result.stderr
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names >= {f"ckpt-{step}" for step in (5, 10, 15, 20)}, result.stderr
