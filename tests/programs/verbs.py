"""Two workers that call save, restore and predict; argv[1] is a shared directory."""

import json
import os
import sys
from pathlib import Path

import ctl
from ctl.profiling import step_profiler
from small_models import Small, digest, every_step, examples, traced_steps


class Saves(Small):
    def after_loop(self, step, means):
        if step == 2 and self.topology.is_chief:
            self.save()  # on one worker only: the chief's decision applies to all


class Hooked(Small):
    """A trainer that records the arguments of its hooks. `after_epoch` fails on the second worker."""

    def __init__(self, **options):
        super().__init__(**options)
        self._told = []

    def before_training(self, step):
        self._told.append(["before", step])

    def after_evaluation(self, step, means, metrics):
        self._told.append(["evaluation", step, means["loss"]])
        return ctl.Decision(learning_rate_factor=0.5) if self.topology.is_chief else None

    def after_epoch(self, epoch, step, means):
        self._told.append(["epoch", epoch, step])
        if epoch == 2 and not self.topology.is_chief:
            raise ZeroDivisionError("on the second worker")


def hooked(directory: Path, strategy) -> dict:
    """Trains two epochs of 4 steps."""
    intervals = every_step(save=ctl.Every(), evaluate=ctl.Every(steps=3))
    trainer = Hooked(model_dir=directory / "hooked", strategy=strategy, writers=[], intervals=intervals)
    try:
        trainer.train(12)
    except Exception as e:
        failure = str(e)
    saved = sorted(p.name for p in (directory / "hooked" / "checkpoints").glob("ckpt*"))
    return {"told": trainer._told, "failure": failure, "saved": saved, "step": trainer.step,
            "rate": float(trainer.optimizer.learning_rate.numpy())}  # fmt: skip


def profiled(directory: Path, strategy) -> dict:
    """Trains with and without `ctl profile`, which is requested from the chief only."""
    step_profiler._MIN_LOOPS, step_profiler._MIN_SECS = 2, 0.0
    digests, profile = [], directory / f"profile-{strategy.cluster_resolver.task_id}.json"
    for name in ("plain", "profiled"):
        intervals = every_step(save=ctl.Every())
        options = {"intervals": intervals, "optimizer": "adam", "tf_data": True}
        trainer = Small(strategy=strategy, writers=[], model_dir=directory / name, **options)
        trainer.train(8)
        digests.append(digest(trainer))
        if trainer.topology.is_chief:
            os.environ["CTL_PROFILE"] = str(profile)
    profile_json = json.loads(profile.read_text()) if profile.exists() else {}
    trace_name = f"worker_{strategy.cluster_resolver.task_id}.xplane.pb"
    traced = [sorted(traced_steps(p)) for p in directory.rglob("*.xplane.pb") if p.name == trace_name]
    measured = trainer._prepared_trainer.activity.has_profiled
    return {"digests": digests, "measured": measured, "profile": profile_json, "traced": traced}


def main(directory: Path) -> None:
    no_intervals = every_step(log=ctl.Every(), save=ctl.Every())
    first = Saves(model_dir=directory / "run", strategy="multi_worker", writers=[], intervals=no_intervals)
    first.train(4)
    first.model.layers[0].bias.assign(first.model.layers[0].bias + 1.0)
    path = first.save()
    second = Small(strategy=first.strategy, writers=[], intervals=no_intervals)
    step = second.restore(directory / "run")
    names = sorted(
        p.name for p in (directory / "run" / "checkpoints").iterdir() if p.name.startswith("ckpt")
    )
    rows = examples()[0][: 5 + first.topology.worker_index]  # each process predicts a separate input
    predicted = second.predict(rows)
    try:
        second.restore(directory / "nothing")
    except ctl.CtlError as e:
        refused, code = str(e), e.exit_code
    print(json.dumps({
        "path": path, "step": step, "same": digest(first) == digest(second), "names": names,
        "digest": digest(second), "rows": len(predicted), "refused": refused, "code": code,
        "hooked": hooked(directory, first.strategy), "profiled": profiled(directory, first.strategy),
    }))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
