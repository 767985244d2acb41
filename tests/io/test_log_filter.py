"""TensorFlow and Keras are imported without garbage collection, and nothing of that stays."""

import gc
import json
import subprocess
import sys

import pytest
from conftest import ROOT, environment
from ctl.io.log_filter import uncollected

PROGRAM = """
import ctl, gc, json
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
import keras, tensorflow
during = len(collections)
print(json.dumps([during, gc.isenabled(), gc.get_freeze_count(), gc.collect() >= 0]))
"""


def imported(**environ):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(**environ), cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout.splitlines()[-1])


def test_an_import_of_tensorflow_is_not_interrupted_by_collections():
    during, *after = imported()
    assert during < 10 and after == [True, 0, True]  # some are made before TensorFlow is asked for


def test_who_wants_all_of_tensorflow_s_log_has_no_hook():
    during, *after = imported(TF_CPP_MIN_LOG_LEVEL="0")
    assert during > 100 and after == [True, 0, True]


@pytest.fixture(autouse=True)
def as_before():
    yield
    gc.unfreeze()
    gc.enable()


def test_collections_go_on_as_they_were():
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_what_somebody_froze_stays_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with uncollected():
        pass
    assert gc.get_freeze_count() >= frozen > 0
