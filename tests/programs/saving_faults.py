"""A small job with faults during saving, as specified in the environment.

    FAULTS="kill:before_commit@4" python saving_faults.py MODEL_DIR --steps=8

A fault is `action:position@step`, several are separated by spaces. `kill` ends the process with -9,
`stop` creates the file SIGNALS/stopped-<step> and waits for SIGNALS/go-<step>. `PLACES` lists the
positions. `limit:BYTES@step` limits the size of files written by the process until the next step.

With `--forever` the program reads lines of arguments from standard input and runs each in a separate
process. It is forked after the import of TensorFlow and before its first use: one import for many runs.
"""

import argparse
import hashlib
import json
import os
import resource
import shlex
import signal
import sys
import time
from pathlib import Path

import ctl
import tensorflow as tf
from ctl.checkpoints import commit, snapshot
from ctl.io import paths
from small_models import Small

PLACES = ("before_write", "mid_data", "before_index", "before_manifest", "before_commit",
          "while_replacing", "before_deleting", "while_deleting", "after_step")  # fmt: skip
DEADLINE_SECS = 600


class Counted(Small):
    """A small trainer with a variable that is summed over workers when it is read."""

    def __init__(self, faults, options, **options_of_trainer):
        super().__init__(
            framework=options.framework, optimizer="adam", dropout=options.dropout, **options_of_trainer
        )
        self._faults, self._options, self._width = faults, options, options.width

    def build(self):
        super().build()
        self.seen = tf.Variable(
            0.0, trainable=False, synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )  # fmt: skip
        if self._width:
            self.large = tf.Variable(tf.random.normal([self._width, 256]), trainable=False)

    def train_step(self, batch):
        self.seen.assign_add(1.0)
        return super().train_step(batch)

    def after_loop(self, step, means):
        self._faults.after_step(step)
        if step == self._options.raise_at:
            raise RuntimeError(f"raised at step {step}")
        if step == self._options.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)


class Faults:
    def __init__(self, text, signals):
        action_and_step = [fault.partition("@") for fault in text.split()]
        self._planned = [(*action.split(":"), int(step)) for action, _, step in action_and_step]
        self._signals, self._step = Path(signals), -1
        assert all(position in PLACES or action == "limit" for action, position, _ in self._planned)
        self._patch()

    def reach(self, position, step=None):
        step = self._step if step is None else step
        for action, fault_position, fault_step in self._planned:
            if (fault_position, fault_step) == (position, step) and action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if (fault_position, fault_step) == (position, step) and action == "stop":
                (self._signals / f"stopped-{step}").touch()
                deadline = time.monotonic() + DEADLINE_SECS
                while not (self._signals / f"go-{step}").exists():
                    assert time.monotonic() < deadline
                    time.sleep(0.005)

    def after_step(self, step):
        self.reach("after_step", step)
        for action, size, fault_step in self._planned:
            if action == "limit" and step in (fault_step, fault_step + 1):
                max_bytes = int(size) if step == fault_step else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, resource.RLIM_INFINITY))

    def _patch(self):
        write, tensors, mark = commit.write_checkpoint, snapshot.Snapshot.write, commit.write_manifest
        remove, discard, rename = commit.remove_checkpoint, commit.discard_directory, Path.rename

        def write_with_faults(directory, manifest, write_state, **options):
            self._step = manifest.step
            self.reach("before_write")
            return write(directory, manifest, write_state, **options)

        def write_tensors_with_faults(state, prefix):
            tensors(state, prefix)
            data, index = Path(f"{prefix}.data-00000-of-00001"), Path(f"{prefix}.index")
            content, head = data.read_bytes(), index.read_bytes()
            data.write_bytes(content[: len(content) // 2])
            index.unlink()
            self.reach("mid_data")
            data.write_bytes(content)
            self.reach("before_index")
            index.write_bytes(head)

        def write_manifest_with_faults(path, manifest):
            self.reach("before_manifest")
            mark(path, manifest)
            self.reach("before_commit")

        def remove_with_faults(path):
            self.reach("before_deleting")
            return remove(path)

        def discard_with_faults(path, ignore_errors=True):
            if path.name.startswith("deleted-"):
                (path / commit.MANIFEST).unlink(missing_ok=True)
                self.reach("while_deleting")
            return discard(path, ignore_errors)

        def rename_with_faults(path, target):
            result = rename(path, target)
            if target.name.startswith("replaced-"):
                self.reach("while_replacing")
            return result

        commit.write_checkpoint, commit.write_manifest = write_with_faults, write_manifest_with_faults
        snapshot.Snapshot.write = write_tensors_with_faults
        commit.remove_checkpoint, commit.discard_directory, Path.rename = (
            remove_with_faults,
            discard_with_faults,
            rename_with_faults,
        )


def digests(trainer):
    """Returns name -> digest of the variable's value. All workers must call it."""
    variables = trainer._prepared_trainer.state.variables
    return {n: hashlib.sha256(v.numpy().tobytes()).hexdigest()[:16] for n, v in variables.items()}


def run(arguments, faults_text):
    options = parser().parse_args(arguments)
    faults = Faults(faults_text, options.signals)
    if options.mounted:
        os.environ[paths.STORES] = str(Path(options.model_dir).absolute())
    keep = ctl.Keep.parse(options.keep)
    virtual = {"num_virtual_devices": 2} if options.strategy == "mirrored" else {}
    strategy = ctl.make_strategy(options.strategy, **virtual)
    manager = ctl.ChiefOnlyCheckpoints(
        f"{options.model_dir}/checkpoints", keep=keep, background=options.background,
        on_error=options.on_error,
    )  # fmt: skip
    intervals = ctl.Intervals(
        steps_per_loop=1, log=ctl.Every(steps=2), save=ctl.Every(steps=options.save_every)
    )
    trainer = Counted(
        faults, options, model_dir=options.model_dir, strategy=strategy, checkpoints=manager,
        intervals=intervals,
    )  # fmt: skip
    result = {}
    try:
        trainer.prepare()
        result |= {"began": trainer.step, "restored": digests(trainer)}
        trainer.train(options.steps)
    except (ctl.CtlError, RuntimeError) as e:
        result |= {"error": f"{type(e).__name__}: {e}", "code": getattr(e, "exit_code", 1)}
        print(json.dumps(result), flush=True)
        sys.stdout.flush()
        os._exit(result["code"])
    saved_again = manager.save(trainer._prepared_trainer.state, ctl.Manifest(
        step=options.steps, created=time.time(), variables=trainer._prepared_trainer.state.spec(),
    )) if options.twice else None  # fmt: skip
    manager.finish()
    if options.compare:
        topology = trainer.topology
        trainer._prepared_trainer.state.checkpoint.write(f"{options.compare}/{topology.worker_index}/state")
    print(json.dumps({**result, "ended": trainer.step, "final": digests(trainer), "again": saved_again}))


def parser():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("model_dir")
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--save_every", type=int, default=2)
    arguments.add_argument("--keep", default="5")
    arguments.add_argument("--strategy", default="default")
    arguments.add_argument("--framework", default="keras3")
    arguments.add_argument("--dropout", type=float, default=0.3)
    arguments.add_argument("--background", action="store_true")
    arguments.add_argument("--on_error", default="continue")
    arguments.add_argument("--width", type=int, default=0, help="rows of 1 kB that the state has besides")
    arguments.add_argument("--raise_at", type=int, default=-1)
    arguments.add_argument("--signal_at", type=int, default=-1)
    arguments.add_argument("--signals", default=".", help="directory for what is told and waited for")
    arguments.add_argument("--mounted", action="store_true", help="model_dir is an object store's")
    arguments.add_argument("--compare", help="directory for what TensorFlow itself writes")
    arguments.add_argument("--twice", action="store_true", help="save the last step once more")
    return arguments


def serve():
    for line in sys.stdin:
        faults, *arguments = shlex.split(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(arguments, faults)
                code = 0
            except BaseException as e:
                print(f"{type(e).__name__}: {e}", flush=True)
            finally:
                sys.stdout.flush()
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        print(json.dumps({"done": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--forever"] else run(sys.argv[1:], os.environ.get("FAULTS", ""))
