"""Import of TensorFlow and Keras without garbage collection, and the state afterwards."""

import gc
import json
import subprocess
import sys

import pytest
from conftest import ROOT, environment
from ctl.io.log_filter import garbage_collection_paused

PROGRAM = """
import gc
frozen_at_start = gc.get_freeze_count()
import ctl, importlib.util, json, sys
assert importlib.util.find_spec("tensorflow")  # find_spec does not consume the hook
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
import keras, tensorflow
during = len(collections)
hooks = [type(finder).__name__ for finder in sys.meta_path]
print(json.dumps([during, gc.isenabled(), "_ImportHook" in hooks, gc.get_freeze_count(), frozen_at_start]))
"""


def imported(**environ):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(**environ), cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout.splitlines()[-1])


def test_an_import_of_tensorflow_is_not_interrupted_by_collections():
    during, *after = imported()
    assert during < 10 and after[:3] == [True, False, 0]  # some run before the import of TensorFlow


def test_with_the_full_log_of_tensorflow_there_is_no_hook():
    during, *after, frozen_at_start = imported(TF_CPP_MIN_LOG_LEVEL="0")
    assert during > 100 and after == [True, False, frozen_at_start]


@pytest.fixture(autouse=True)
def restore_collector():
    yield
    gc.unfreeze()
    gc.enable()


def test_the_state_of_the_collector_is_restored():
    with garbage_collection_paused():
        assert not gc.isenabled()
        with garbage_collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with garbage_collection_paused():
        pass
    assert not gc.isenabled()


def test_frozen_objects_stay_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with garbage_collection_paused():
        pass
    assert gc.get_freeze_count() > frozen // 2 > 0  # some objects may have been freed
