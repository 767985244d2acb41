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

STARTUP = ("cuInit", "Unable to register")  # in lines of TensorFlow that `import ctl` would have hidden

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
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(error=error)], env=environment(), capture_output=True,
        text=True, timeout=TIMEOUT_SECS, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stdout == "first\n" + "tidied up\n" * tidied
    if code != 143:
        assert error.partition("'")[2].rstrip("')") in done.stderr


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
    def __del__(self): print("torn down")      # skipped: nothing is destroyed
late = Late()
{raises}
"""


def test_exit_runs_exit_functions_flushes_files_and_tears_nothing_down(tmp_path):
    done = run_script(EXIT.format(raises="gc.freeze(); raise exit_hook.Exit(7)"), str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (7, "a thread ends\nfirst registered\n"), done.stderr
    assert (tmp_path / "file").read_text() == "not yet flushed"


def test_exit_that_is_caught_changes_nothing(tmp_path):
    caught = "try: raise exit_hook.Exit(7)\nexcept SystemExit as e: print(e.code)\nsys.exit(3)"
    done = run_script(EXIT.format(raises=caught), str(tmp_path / "file"))
    assert done.returncode == 3 and "torn down" in done.stdout


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


def test_exit_closes_what_writes_its_last_part_when_it_is_closed(tmp_path):
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
time.sleep(0.3)                            # until it waits
print("summary")
raise exit_hook.Exit(0)
"""


@pytest.mark.parametrize(("use", "secs"), [("reads", 1000), ("writes", 0.5)])
def test_exit_does_not_wait_for_a_thread_that_uses_a_file(use, secs):
    done = run_script(IN_USE, use, str(secs))
    assert (done.returncode, done.stdout) == (0, "summary\n"), done.stderr


TORN_DOWN = """
import ctypes, os, sys, types
from ctl.io import exit_hook
exit_hook.install_exit_hook()
library = ctypes.CDLL(None)
library.on_exit(library.abort, None)      # in the place of TensorFlow's destructors

class Late:
    def __init__(self, name): self.name = name
    def __del__(self, write=os.write): write(1, self.name)

kept = Late(b"kept")
exit_hook.keep_alive(lambda: [kept], pause=lambda: None)
sys.modules["tensorflow.python.eager.context"] = types.SimpleNamespace(_context=Late(b"context"))
sys.exit(5)
"""


def test_a_script_that_ends_by_itself_destroys_neither_what_is_kept_nor_tensorflow():
    done = run_script(TORN_DOWN)
    assert (done.returncode, done.stdout) == (5, ""), done.stderr


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


def test_a_script_with_open_pipelines_ends_with_its_code_and_without_a_word():
    done = run_script(PIPELINES)
    said = [line for line in done.stderr.splitlines() if not any(w in line for w in STARTUP)]
    assert (done.returncode, said) == (5, [])


OWN_ITERATORS = """
import gc, os, sys
import ctl
import tensorflow as tf
from ctl.io import exit_hook

class Late:
    def __init__(self, name): self.name = name
    def __del__(self, write=os.write): write(1, b"destroyed " + self.name.encode() + b"\\n")

known = set()
def named(name, thing):
    for tensor in gc.get_objects():               # handles that this one has made
        is_handle = type(tensor).__name__ == "EagerTensor" and tensor.dtype == tf.resource
        if is_handle and id(tensor) not in known:
            known.add(id(tensor))
            tensor.marker = Late(name)
    return thing

def opened():
    return iter(data.map(lambda x: x + 1, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE))

def numbers():
    iterator = named("generator", opened())
    while True: yield next(iterator)

def taking():
    iterator = opened()
    return named("function", tf.function(lambda: next(iterator)).get_concrete_function())

gc.disable()
data = tf.data.Dataset.range(10**9)
module = named("module", opened())
generator = numbers()
next(generator)
strategy = tf.distribute.MirroredStrategy(["CPU:0"])
distributed = named("distributed", iter(strategy.experimental_distribute_dataset(data.batch(4))))
function = taking()
cycle = [named("cycle", opened())]
cycle.append(cycle)
del cycle
if sys.argv[1] == "frozen": gc.freeze()
if sys.argv[1] != "bare": exit_hook.install_exit_hook()
sys.exit(5)
"""


def destroyed_iterators(how):
    done = run_script(OWN_ITERATORS, how)
    assert done.returncode == 5, done.stderr
    return set(done.stdout.splitlines())


def test_iterators_of_a_script_s_own_are_not_destroyed_when_it_ends():
    """tf.data's destructor waits for its autotuning thread, which may sleep for a minute."""
    places = ("module", "generator", "distributed", "function", "cycle")
    assert destroyed_iterators("bare") == {f"destroyed {place}" for place in places}  # they can be seen
    assert destroyed_iterators("installed") == set()


@pytest.mark.slow
def test_iterators_that_the_collector_does_not_see_are_not_destroyed_either():
    assert destroyed_iterators("frozen") == set()


DESTROYED = """
import os, threading
import ctl, tensorflow as tf
from ctl.data.batches import Batches
from ctl.io import exit_hook
exit_hook.install_exit_hook()

class Iterator:
    def __del__(self, write=os.write, thread=threading.current_thread):
        write(1, b"destroyed by ")            # at the end of the process the rest may fail
        write(1, thread().name.encode())
        destroyed.set()

destroyed = threading.Event()
dropped, held = (Batches(Iterator(), None, False, None, "skip", "") for _ in range(2))
del dropped
destroyed.wait(60)
"""


def test_an_iterator_is_destroyed_by_a_thread_of_its_own_or_never():
    """tf.data's destructor may wait for as long as the pipeline has run."""
    assert run_script(DESTROYED, start=processes.run).stdout == "destroyed by ctl-destroy"


HALF_DESTROYED = """
import os, threading, time
import ctl, tensorflow as tf
from ctl.data.batches import Batches
from ctl.io import exit_hook
exit_hook.install_exit_hook()

class Iterator:
    def __del__(self, write=os.write, sleep=time.sleep):
        begun.set()
        sleep(SECS)
        write(1, b"destroyed")

begun = threading.Event()
dropped = Batches(Iterator(), None, False, None, "skip", "")
del dropped
begun.wait(60)
"""


@pytest.mark.parametrize("secs", [1, pytest.param(11, marks=pytest.mark.slow)])
def test_the_interpreter_does_not_end_while_an_iterator_is_being_destroyed(secs):
    """A thread that comes back from native code meanwhile would abort the process."""
    done = run_script(HALF_DESTROYED.replace("SECS", str(secs)), start=processes.run)
    assert done.stdout == "destroyed"


def test_an_error_waits_for_threads_and_one_that_is_only_shown_ends_nothing():
    script = """
import sys, threading, time
from ctl.io import exit_hook
exit_hook.install_exit_hook()
try: raise ValueError("shown")
except ValueError: sys.excepthook(*sys.exc_info())
said = threading.Event()
threading.Thread(target=lambda: (said.wait(), time.sleep(0.3), print("a thread ends"))).start()
print("goes on")
said.set()
raise KeyError("the end")
"""
    done = run_script(script)
    assert (done.returncode, done.stdout) == (1, "goes on\na thread ends\n")
    assert "shown" in done.stderr and "the end" in done.stderr
