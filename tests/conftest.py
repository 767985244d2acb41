"""Fixtures of all tests: two logical CPUs per test process, and worker processes on the loopback device."""

import atexit
import functools
import gc
import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import ctl  # hides TensorFlow's start-up lines
import pytest
import tensorflow as tf
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "programs"
TIMEOUT_SECS = 600  # reached by failures only; a busy machine takes several times as long as a quiet one
# these files run first
LONGEST_FILES = {
    "test_docs.py",
    "test_docs_commands.py",
    "test_models_gallery.py",
    "test_deploy_slurm.py",
    "test_deploy_docker.py",
    "test_keras_behaviours.py",
    "test_published_programs.py",
    "test_fit.py",
    "test_trees.py",
    "test_strategy_matrix.py",
    "test_sparse_gradients.py",
    "test_directory_names.py",
    "test_flowers_jobs.py",
    "test_served_jobs.py",
}
FOLDERS = sorted({path.parent for path in (ROOT / "tests").rglob("test_*.py")})
# `python` of the documents is that of this environment; Debian has none
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
sys.path[:0] = map(str, [PROGRAMS, *FOLDERS])  # tests import programs and other tests

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
# Grappler takes 14 % of the CPU time of short trainings; the processes that tests start have it
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
gc.disable()  # until all tests are collected
atexit.register(gc.freeze)  # runs last, so that the exit of pytest traverses no objects

settings.register_profile("few", max_examples=100, deadline=None)
settings.register_profile("quick", max_examples=20, deadline=None)  # make test
settings.register_profile("many", max_examples=150, deadline=None)  # make test-all
settings.load_profile("few")


def some_of(cases, *fast):
    """Returns the cases as parameters of a test, with the marker `slow` for all that are not in `fast`.

    The slow cases run the same lines of code as the fast ones.
    """
    assert {*fast} <= {*cases}
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def pytest_collection_modifyitems(items):
    """Marks the tests that start processes, directly or through functions of tests/."""
    starts_by_object: dict[object, bool] = {}
    for item in items:
        fixtures = [f.func for fs in item._fixtureinfo.name2fixturedefs.values() for f in fs]
        if any(starts_processes(definition, starts_by_object) for definition in (item.function, *fixtures)):
            item.add_marker("workers")
    items[:] = alternate_files_with_processes(items)


def pytest_collection_finish(session):
    gc.collect()  # not freeze(): it causes frequent full collections, and a destructor of tf.data may block
    gc.set_threshold(700, 10, 150)  # a full collection traverses 1.6 million objects (1 s)
    gc.enable()


def alternate_files_with_processes(items: list) -> list:
    """Alternates files that start processes, which often wait, with files that keep the cores busy.

    Folders come in reverse order, from tests/workers to the first, so that long tests do not run last.
    """
    files: dict[object, list] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    with_processes = [f for f in files.values() if any(i.get_closest_marker("workers") for i in f)]
    without_processes = [f for f in files.values() if f not in with_processes]
    with_processes.sort(key=lambda file: file[0].path.name in LONGEST_FILES)
    without_processes.sort(key=lambda file: (file[0].path.name in LONGEST_FILES, len(file)))
    pairs = itertools.zip_longest(reversed(with_processes), reversed(without_processes), fillvalue=[])
    return [item for pair in pairs for file in pair for item in file]


def starts_processes(definition, starts_by_object: dict[object, bool]) -> bool:
    """Returns whether a function or class of tests/ starts a process, or uses one that does."""
    if not isinstance(definition, types.FunctionType | type) or not _is_of_tests(definition.__module__):
        return False
    if definition not in starts_by_object:
        starts_by_object[definition] = False  # ends recursion
        members = [definition] if isinstance(definition, types.FunctionType) else vars(definition).values()
        for function in members:
            unwrapped = getattr(function, "__func__", getattr(function, "__wrapped__", function))
            if any(
                _starts_process_directly(u) or starts_processes(u, starts_by_object)
                for u in _used_by(unwrapped)
            ):
                starts_by_object[definition] = True
    return starts_by_object[definition]


def _starts_process_directly(used) -> bool:
    return used is subprocess or used is multiprocessing or used is os.fork


@functools.cache
def _is_of_tests(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and Path(file).is_relative_to(ROOT / "tests")


def _names_in(function) -> set[str]:
    """Returns all names that a function uses, including attributes."""
    codes, names = [getattr(function, "__code__", None)], set()
    while codes:
        code = codes.pop()
        if code is not None:
            names.update(code.co_names)
            codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return names


def _used_by(function) -> list:
    """Returns the global values that a function uses, and the module attributes among them."""
    if not isinstance(function, types.FunctionType):
        return []
    names = _names_in(function)
    values = [function.__globals__.get(name) for name in names]
    values += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    modules = [v for v in values if isinstance(v, types.ModuleType)]
    return values + [vars(m).get(n) for m in modules for n in names]


@pytest.fixture(autouse=True)
def unchanged_environment():
    """Restores the environment variables. Fails if a test has changed them."""
    before = dict(os.environ)
    yield
    after = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    before.pop("PYTEST_CURRENT_TEST", None)
    changed_names = sorted(k for k in {*before, *after} if before.get(k) != after.get(k))
    for name in changed_names:
        os.environ.pop(name, None)
        os.environ.update({name: before[name]} if name in before else {})
    assert not changed_names, f"the test changed these variables: {changed_names}"


@pytest.fixture
def two_replicas():
    """A MirroredStrategy over two logical CPUs."""
    return ctl.make_strategy("mirrored", devices=["cpu:0", "cpu:1"])


@dataclass
class Result:
    """Result of a process: exit code, output, and its last line of JSON."""

    code: int
    output: str
    all_results: "list[Result]" = field(default_factory=list, repr=False)  # of all processes

    @property
    def json(self):
        lines = [line for line in self.output.splitlines() if line.startswith("{")]
        ends = "".join(f"\n\nexit code {r.code}: {r.output[-3000:]}" for r in self.all_results or [self])
        assert lines, f"no JSON line. All processes:{ends}"
        return json.loads(lines[-1])


class PortBlocks:
    """Ports for tests, reserved against this and other test processes.

    They lie outside the range from which the kernel takes ports of outgoing connections. A test process
    owns a block as long as it holds the first port of the block, which is bound and not used by tests.
    """

    PORTS = range(7000, 15000)  # the ports of Slurm's steps begin at 15000
    SIZE = 200

    def __init__(self) -> None:
        self._owners: list[socket.socket] = []  # of the current and the previous block
        self._ports: Iterator[int] = iter(())

    def take(self) -> int:
        """Returns a free port. The next port is free too, because a worker of `tcp` listens at both."""
        for port in self._ports:
            if all(map(self._is_free, (port, port + 1))):
                return port
        self._own_next_block()
        return self.take()

    @functools.cached_property
    def _blocks(self) -> Iterator[int]:
        """First ports of the blocks, each once. Test processes start at different blocks."""
        firsts = [port for port in self.PORTS[:: self.SIZE] if not self._is_of_clients(port)]
        firsts = firsts or list(self.PORTS[:: self.SIZE])  # the system uses all ports for clients
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
        begin = (os.getpid() * 7 + worker * 13) % len(firsts)
        return iter([*firsts[begin:], *firsts[:begin]])

    def _own_next_block(self) -> None:
        for first in self._blocks:
            owner = socket.socket()
            try:
                owner.bind(("", first))
            except OSError:
                owner.close()
                continue
            self._owners.append(owner)
            while len(self._owners) > 2:
                self._owners.pop(0).close()
            self._ports = iter(range(first + 2, first + self.SIZE, 2))
            return
        raise AssertionError(f"no port of {self.PORTS} is free")

    def _is_of_clients(self, first: int) -> bool:
        try:
            text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        except OSError:
            return False
        lowest, highest = map(int, text.split())
        return first + self.SIZE > lowest and first <= highest

    def _is_free(self, port: int) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every listener does
            try:
                probe.bind(("", port))
            except OSError:
                return False
        return True


_port_blocks = PortBlocks()


def free_ports(count: int) -> list[int]:
    """Returns ports at which no process listens. Each is returned once."""
    return [_port_blocks.take() for _ in range(count)]


def environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(PROGRAMS)])
    clean = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    return {**clean, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **extra}


@pytest.fixture(scope="session")
def run_program(tmp_path_factory):
    """A function `run(count, arguments)` that returns a Result per process.

    Each process has its TF_CONFIG if count > 1, with the next one of `hosts`. With `fresh`, the process is
    a new interpreter.
    """
    import processes as starter

    started: list[subprocess.Popen] = []

    def run(
        count: int, arguments: list[str], *, fresh=False, hosts=("127.0.0.1",), **extra: str
    ) -> list[Result]:
        start = subprocess.Popen if fresh else starter.start
        addresses = [f"{hosts[i % len(hosts)]}:{port}" for i, port in enumerate(free_ports(count))]
        logs, processes = [], []
        for i in range(count):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}}
            env = environment(**extra, **({"TF_CONFIG": json.dumps(config)} if count > 1 else {}))
            logs.append(tmp_path_factory.mktemp("process") / "log")
            with logs[-1].open("wb") as log:
                process = start(
                    [sys.executable, *arguments], stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT
                )
            started.append(process)
            processes.append(process)
        codes = [p.wait(timeout=TIMEOUT_SECS) for p in processes]
        results: list[Result] = []
        results += [Result(c, log.read_text(), results) for c, log in zip(codes, logs, strict=True)]
        return results

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def job(tmp_path):
    """A launcher that a test starts once. It is killed at the end, together with its workers."""
    from launching import Job

    started = Job(tmp_path)
    yield started
    if started.process is not None and started.process.poll() is None:
        started.process.kill()
        started.process.wait(TIMEOUT_SECS)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory):
    """A function `get(workers, *options)`: returns the model_dir of a run of faulty.py without faults."""
    from training import run

    model_dir_by_options = {}

    def get(workers, *options):
        key = workers, options
        if key not in model_dir_by_options:
            model_dir_by_options[key] = tmp_path_factory.mktemp("unbroken") / "run"
            result = run(model_dir_by_options[key], *options, workers=workers)
            assert result.code == 0, result.output[-3000:]
        return model_dir_by_options[key]

    return get


@pytest.fixture(scope="session")
def all_ssh_hosts(tmp_path_factory):
    """Three hosts with sshd, and a machine "launch"; shared by all tests of a process."""
    import ssh_hosts

    if reason := ssh_hosts.missing():
        pytest.skip(reason)
    with ssh_hosts.SshHosts(tmp_path_factory.mktemp("ssh_hosts"), ["hosta", "hostb", "hostc"]) as hosts:
        yield hosts


@pytest.fixture
def ssh_hosts(all_ssh_hosts):
    """The same hosts, reset after each test."""
    yield all_ssh_hosts
    all_ssh_hosts.reset()
