"""Two workers, of which the second sees the checkpoints later than the first, or never.

late_directory.py <directory>: prints what became of a resumed run where they come late, where they do
not come, and where the second worker sees another content.
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
STRATEGY = ctl.make_strategy("multi_worker", heartbeat_secs=60)  # copying and waiting, on busy machines
CHIEF = STRATEGY.cluster_resolver.task_id == 0


class WhenWaiting(logging.Handler):
    """Does something as soon as a worker says that it waits."""

    def __init__(self, act):
        super().__init__()
        self._act = act

    def emit(self, record):
        if record.getMessage().startswith("Waiting for the checkpoint"):
            self._act()


def resumed(model_dir, act=lambda: None, restore=None, **options):
    handler = WhenWaiting(act)
    logging.getLogger("ctl").addHandler(handler)
    trainer = make(model_dir, **options)
    try:
        trainer.prepare()
        if restore is not None:
            trainer.restore(str(restore))
        return {"step": trainer.step}
    except ctl.CtlError as e:
        return {"error": str(e), "code": e.exit_code}
    finally:
        logging.getLogger("ctl").removeHandler(handler)


def make(model_dir, **options):
    where = None if model_dir is None else str(model_dir)
    return Small(strategy=STRATEGY, model_dir=where, intervals=every_step(), writers=[], **options)


def main():
    shared = DIRECTORY / "shared"
    make(shared).train(3)
    late = DIRECTORY / ("shared" if CHIEF else "late")
    seen = late / "checkpoints"
    result = {"late": resumed(late, lambda: seen.symlink_to(shared / "checkpoints"))}
    restoring.VISIBILITY_TIMEOUT_SECS = 1.0
    result["never"] = resumed(shared if CHIEF else DIRECTORY / "nowhere")
    other = shared if CHIEF else DIRECTORY / "other"
    if not CHIEF:  # the chief makes and removes other files in the meantime
        shutil.copytree(shared / "checkpoints", other / "checkpoints")
        (other / "checkpoints" / "ckpt-3" / "state.index").write_bytes(b"old")
    result["other content"] = resumed(other)
    make(DIRECTORY / "second", seed=5).train(3)
    second = shared if CHIEF else DIRECTORY / "second"
    result["another run"] = resumed(second)
    result["restore"] = resumed(None, restore=second)
    result["init_from"] = resumed(None, init_from=str(second))
    result["the same"] = resumed(None, init_from=str(shared))
    result["there"] = sorted(p.name for p in (shared / "checkpoints").iterdir())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
