"""Two workers, of which the second reads the checkpoints later than the first, or never.

late_directory.py <directory>: prints the results of a resumed run if the checkpoints are late, if they
are absent, and if the second worker reads different content.
"""

import json
import logging
import shutil
import sys
from pathlib import Path

import ctl
from ctl.checkpoints import restoring
from small_models import Small, every_step

DIRECTORY = Path(sys.argv[1])
STRATEGY = ctl.make_strategy("multi_worker", heartbeat_secs=60)  # for copying and waiting on busy machines
CHIEF = STRATEGY.cluster_resolver.task_id == 0


class WhenWaiting(logging.Handler):
    """A log handler that calls a function when a worker waits for a checkpoint."""

    def __init__(self, callback):
        super().__init__()
        self._callback = callback

    def emit(self, record):
        if record.getMessage().startswith("Waiting for the checkpoint"):
            self._callback()


def resume(model_dir, callback=lambda: None, restore=None, **options):
    handler = WhenWaiting(callback)
    logging.getLogger("ctl").addHandler(handler)
    trainer = make_trainer(model_dir, **options)
    try:
        trainer.prepare()
        if restore is not None:
            trainer.restore(str(restore))
        return {"step": trainer.step}
    except ctl.CtlError as e:
        return {"error": str(e), "code": e.exit_code}
    finally:
        logging.getLogger("ctl").removeHandler(handler)


def make_trainer(model_dir, **options):
    directory = None if model_dir is None else str(model_dir)
    return Small(strategy=STRATEGY, model_dir=directory, intervals=every_step(), writers=[], **options)


def main():
    shared = DIRECTORY / "shared"
    make_trainer(shared).train(3)
    late_dir = DIRECTORY / ("shared" if CHIEF else "late")
    visible_checkpoints = late_dir / "checkpoints"
    result = {"late": resume(late_dir, lambda: visible_checkpoints.symlink_to(shared / "checkpoints"))}
    restoring.VISIBILITY_TIMEOUT_SECS = 1.0
    result["never"] = resume(shared if CHIEF else DIRECTORY / "nowhere")
    other = shared if CHIEF else DIRECTORY / "other"
    if not CHIEF:  # the chief creates and removes other files concurrently
        shutil.copytree(shared / "checkpoints", other / "checkpoints")
        (other / "checkpoints" / "ckpt-3" / "state.index").write_bytes(b"old")
    result["other content"] = resume(other)
    make_trainer(DIRECTORY / "second", seed=5).train(3)
    second = shared if CHIEF else DIRECTORY / "second"
    result["another run"] = resume(second)
    result["restore"] = resume(None, restore=second)
    result["init_from"] = resume(None, init_from=str(second))
    result["the same"] = resume(None, init_from=str(shared))
    result["there"] = sorted(p.name for p in (shared / "checkpoints").iterdir())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
