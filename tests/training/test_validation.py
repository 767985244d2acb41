"""Validation before training: full disks, misspelt metrics, seeds, environment variables."""

import errno
import json
import os
import socket
import subprocess
from pathlib import Path

import ctl
import pytest
import tensorflow as tf
from conftest import free_ports
from ctl.checkpoints import restoring
from ctl.checkpoints.chief_only import ChiefOnlyCheckpoints
from ctl.collectives.failures import create_exception
from ctl.distribute.platforms import detection, slurm
from ctl.distribute.topology import Topology
from ctl.errors import PeerLostError, ReadError, StorageError
from ctl.io import paths
from ctl.supervision.lease import Lease
from ctl.training import error_translation
from ctl.training.model_directory import check_model_directory
from small_disks import fill
from small_models import Small, every_step
from test_metric_writers_disk import small_disk  # noqa: F401


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)


def make_trainer(**options):
    return Small(strategy="default", writers=[], **options)


def test_a_full_disk_is_detected_before_the_first_step(small_disk, no_pauses):  # noqa: F811
    (small_disk / "run").mkdir()
    fill(small_disk / "filler")
    (small_disk / "run" / "empty").touch()  # an empty file needs no space
    trainer = make_trainer(model_dir=str(small_disk / "run"))
    with pytest.raises(StorageError, match="cannot be written: No space left on device") as raised:
        trainer.train(2)
    assert raised.value.exit_code == 134


@pytest.mark.parametrize(
    ("number", "error_class"),
    [
        (errno.ENOSPC, StorageError), (errno.EDQUOT, StorageError), (errno.EIO, StorageError),
        (errno.ESTALE, StorageError), (errno.ETIMEDOUT, StorageError), (errno.EACCES, ctl.UsageError),
        (errno.EROFS, ctl.UsageError), (errno.ENAMETOOLONG, ctl.UsageError), (None, None),
    ],
)  # fmt: skip
def test_only_a_transient_error_allows_a_restart(tmp_path, monkeypatch, no_pauses, number, error_class):
    """None: the error disappears within the retries."""
    probe, calls = paths.probe, []

    def failing(*args):
        calls.append(args)
        if number is not None or len(calls) < 3:
            raise OSError(number or errno.EIO, os.strerror(number or errno.EIO))
        probe(*args)

    monkeypatch.setattr(paths, "probe", failing)
    if error_class is None:
        check_model_directory(str(tmp_path))
        assert len(calls) == 3
        return
    with pytest.raises(error_class, match=f"cannot be written: {os.strerror(number)}"):
        check_model_directory(str(tmp_path))
    assert len(calls) == (7 if error_class is StorageError else 1)


def test_a_run_with_checkpoints_resumes_on_a_full_disk(small_disk, caplog, no_pauses):  # noqa: F811
    options = {"model_dir": str(small_disk / "run"), "intervals": every_step()}
    make_trainer(**options).train(2)
    fill(small_disk / "filler")
    trainer = make_trainer(**options)
    trainer.prepare()
    assert trainer.step == 2
    assert "cannot be written: No space left on device. Training resumes nevertheless" in caplog.text
    (small_disk / "filler").unlink()
    trainer.train(4)
    assert Lease(small_disk / "run" / "LOCK").read().step == 4


class Large(Small):
    def build(self):
        super().build()
        self.large = tf.Variable(tf.zeros([400_000]), trainable=False)  # 1.6 MB


def test_a_disk_too_small_for_a_checkpoint_is_detected_before_the_first_step(small_disk):  # noqa: F811
    trainer = Large(strategy="default", writers=[], model_dir=str(small_disk / "run"))
    with pytest.raises(StorageError, match=r"cannot hold a checkpoint: No space left.*needs 1,6\d\d,"):
        trainer.train(2)
    assert trainer.step == 0
    assert not list(small_disk.rglob(".probe*"))


@pytest.mark.parametrize(("size", "error_class"), [(1_500_000, ctl.UsageError), (10**9, StorageError)])
def test_a_checkpoint_larger_than_the_probe_is_detected_too(tmp_path, monkeypatch, size, error_class):
    """A restart does not help on a disk that is too small, so that this is a UsageError."""
    monkeypatch.setattr(paths, "free_bytes", lambda where: 1_000_000)
    monkeypatch.setattr(paths, "total_bytes", lambda where: size)
    trainer = Large(strategy="default", writers=[], model_dir=str(tmp_path))
    with pytest.raises(error_class, match=r"needs 1,6\d\d,\d* bytes and 1,000,000 are free"):
        trainer.train(2)


def test_a_disk_whose_fsync_fails_is_detected_too(tmp_path, monkeypatch):
    def raise_quota_error(descriptor):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(paths.os, "fsync", raise_quota_error)
    with pytest.raises(OSError, match="quota"):
        paths.probe(tmp_path, 10)
    assert not list(tmp_path.iterdir())


def test_a_disk_without_inodes_is_detected_before_the_first_step(small_disk, no_pauses):  # noqa: F811
    small = subprocess.run(["mount", "-o", "remount,nr_inodes=6", str(small_disk)], check=False)
    if small.returncode:
        pytest.skip("no limit of inodes")
    (small_disk / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(OSError, match="No space left"):
        for i in range(10):
            (small_disk / f"filler-{i}").touch()
    with pytest.raises(StorageError, match="cannot be written: No space left on device"):
        make_trainer(model_dir=str(small_disk / "run")).train(2)


def test_a_checkpoint_manager_of_another_class_is_refused():
    class Manager:
        def save(self, state, manifest):
            pass

        def restore(self, state, step=None):
            pass

    with pytest.raises(ctl.UsageError, match="expected a ctl.CheckpointManager, e.g. ctl.ChiefOnly"):
        make_trainer(checkpoints=Manager())


@pytest.mark.parametrize("setting", ["keep", "early_stopping", "plateau", "save_best"])
def test_a_metric_that_eval_step_does_not_return_is_refused_before_the_first_step(setting, tmp_path):
    callback = {"early_stopping": ctl.EarlyStopping("typo"), "plateau": ctl.ReduceOnPlateau("typo"),
                "save_best": ctl.SaveBest("typo")}.get(setting)  # fmt: skip
    keep = ctl.Keep(best="typo") if setting == "keep" else ctl.Keep()
    checkpoints = ChiefOnlyCheckpoints(tmp_path / "checkpoints", keep=keep)
    trainer = make_trainer(model_dir=str(tmp_path), checkpoints=checkpoints,
                           intervals=every_step(evaluate=ctl.Every(steps=50)))  # fmt: skip
    trainer.callbacks = [callback] if callback is not None else []
    with pytest.raises(ctl.UsageError, match="'typo'.*loss"):
        trainer.train(3)
    assert trainer.step == 0


@pytest.mark.parametrize("seed", [2**32, 2**64, 10**30, -1])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ctl.UsageError, match=f"seed is {seed}; expected .*<= 4294967295"):
        make_trainer(seed=seed)


DEEP = '{"cluster":' + "[" * 100_000 + "]" * 100_000 + "}"
LONG = '{"task": {"type": "worker", "index": ' + "9" * 5000 + "}}"
INFINITE = json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}})


@pytest.mark.parametrize(
    "environ",
    [
        {"TF_CONFIG": DEEP}, {"TF_CONFIG": LONG},
        {"TF_CONFIG": INFINITE.replace('"index": 1', '"index": Infinity')},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:' + "9" * 5000 + '"]}}'},
        {"CLUSTER_SPEC": DEEP}, {"CLUSTER_SPEC": LONG}, {"SM_HOSTS": "[" * 100_000},
        {"SM_HOSTS": "9" * 5000}, {"CTL_WORKERS": "a:1,b:2", "CTL_TASK_INDEX": "9" * 5000},
    ],
    ids=["deep", "long", "infinite", "port", "spec deep", "spec long", "hosts deep", "hosts long", "index"],
)  # fmt: skip
def test_oversized_environment_variables_are_refused(environ):
    with pytest.raises(ctl.UsageError) as raised:
        detection.read_topology(environ)
    assert 10 < len(str(raised.value)) < 1500


@pytest.mark.parametrize("text", ["n[1-999999999]", "n[1-999][1-999]", "n[1-" + "9" * 5000 + "]", "n[²-3]"])
def test_an_oversized_list_of_hosts_is_refused(text):
    with pytest.raises(ctl.UsageError, match="Slurm's list of hosts has"):
        slurm.host_names(text)
    with pytest.raises(ctl.UsageError, match="Slurm's tasks per host"):
        slurm.tasks_of_hosts("1(x999999999)", 2)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"pid": ' + "9" * 5000 + "}"])
def test_an_oversized_lock_is_read_as_none(tmp_path, content):
    (tmp_path / "LOCK").write_text(content)
    assert Lease(tmp_path / "LOCK").read() is None


def test_a_directory_of_checkpoints_that_cannot_be_read_is_a_read_error(tmp_path, monkeypatch):
    def raise_permission_error(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", raise_permission_error)
    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    with pytest.raises(ReadError, match="cannot be read: Permission denied") as raised:
        restoring.newest_checkpoint(tmp_path)
    assert raised.value.exit_code == 134


@pytest.mark.parametrize("error_class", [tf.errors.InternalError, tf.errors.UnknownError])
def test_a_failure_of_nccl_with_several_workers_is_a_lost_peer(error_class):
    def explained(text, has_peers=True):
        return error_translation.explained(
            error_class(None, None, text), step=3, manager=None, batch_size=8,
            topology=Topology({"worker": ("a:1", "b:1")}, num_replicas=2), has_peers=has_peers,
        )  # fmt: skip

    peer_lost = explained("NCCL: remote process exited or there was a network error")
    assert isinstance(peer_lost, PeerLostError) and "NCCL: remote process" in str(peer_lost)
    assert type(explained("NCCL: invalid usage")) is error_class
    assert type(explained("something else")) is error_class
    assert type(explained("NCCL: unhandled system error", has_peers=False)) is error_class


def test_errors_of_the_engine_are_those_of_tensorflow_s_path():
    def explained(error):
        return error_translation.explained(
            error, step=3, manager=None, batch_size=8,
            topology=Topology({"worker": ("a:1", "b:1")}, num_replicas=2), has_peers=True,
        )  # fmt: skip

    peer_lost = explained(create_exception("LOST", "rank 1 died (the connection was closed)"))
    assert isinstance(peer_lost, PeerLostError) and "(rank 1 died (the connection" in str(peer_lost)
    message = "ctl.sum: the shape of the tensor differs, ..."
    usage_error = explained(create_exception("FAILED_PRECONDITION", message))
    assert isinstance(usage_error, ctl.UsageError) and "Step 3: ctl.sum: the shape" in str(usage_error)


CANNOT_CONNECT = """
import contextlib, json
import ctl
from ctl.distribute import own_port, startup_barrier
startup_barrier.wait_for_workers = lambda *_: contextlib.nullcontext()  # the fault comes after the barrier
own_port.check_port_is_free = lambda cluster: None
try:
    ctl.make_strategy("multi_worker")
except ctl.PeerLostError as e:
    print(json.dumps({"error": str(e), "code": e.exit_code}), flush=True)
"""


@pytest.mark.workers
def test_workers_that_tensorflow_cannot_connect_are_a_lost_peer(run_program):
    with socket.create_server(("127.0.0.1", 0)) as server:
        workers = [f"127.0.0.1:{server.getsockname()[1]}", f"127.0.0.1:{free_ports(1)[0]}"]
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 0}}
        (result,) = run_program(1, ["-c", CANNOT_CONNECT], TF_CONFIG=json.dumps(config))
    assert result.json["code"] == 134, result.output
    assert "could not connect the workers: " in result.json["error"]


@pytest.mark.workers
def test_deterministic_operations_start_with_several_workers(run_program):
    program = (
        "import os; os.environ['TF_DETERMINISTIC_OPS'] = '1'; import ctl; from small_models import Small; "
        "t = Small(strategy=ctl.make_strategy('multi_worker'), writers=[]); t.train(2); "
        "print('{\"step\": %d}' % t.step)"
    )
    first, second = run_program(2, ["-c", program])
    assert first.json == second.json == {"step": 2}, first.output
