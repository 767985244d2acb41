"""A signal in an evaluation that a callback, a hook or an evaluator has started."""

import json
import os
import signal

import ctl
import pytest
from small_models import Small, every_step


class Signalled(Small):
    """Receives SIGTERM when `ends` is true and an evaluation begins."""

    ends = False

    def eval_data(self, batch_size):
        if self.ends:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().eval_data(2)

    def evaluate_with_signal(self):
        self.ends = True
        self.evaluate()


class InHook(Signalled):
    def after_loop(self, step, means):
        if step == 2:
            self.evaluate_with_signal()


class Evaluates(ctl.NullCallback):
    def before_training(self, trainer, step):
        self.trainer = trainer

    def on_metrics(self, step, values, run):
        if (run, step) == ("train", 2):
            self.trainer.evaluate_with_signal()


@pytest.mark.parametrize(("trainer_class", "callbacks"), [(InHook, ()), (Signalled, (Evaluates(),))])
def test_a_signal_in_an_evaluation_of_the_user_ends_the_run_with_a_checkpoint(
    trainer_class, callbacks, tmp_path
):
    intervals = every_step(steps_per_loop=1)
    trainer = trainer_class(
        strategy="default", writers=[], intervals=intervals, model_dir=str(tmp_path), callbacks=callbacks
    )
    with pytest.raises(ctl.Stopped) as stopped:
        trainer.train(6)
    assert stopped.value.exit_code == 143 and 2 <= trainer.step <= 3  # at the next agreement of the workers
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"ckpt-{trainer.step}"]


def test_a_signal_in_an_evaluation_of_an_evaluator_ends_it_without_a_result(tmp_path, monkeypatch):
    options = {"strategy": "default", "intervals": every_step(save=ctl.Every(steps=1))}
    Small(model_dir=str(tmp_path), writers=[], **options).train(1)
    cluster = {"worker": ["localhost:1"], "evaluator": ["localhost:2"]}
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
    )
    writer = ctl.MemoryWriter()
    trainer = Signalled(model_dir=str(tmp_path), writers=[writer], **options)
    trainer.ends = True
    with pytest.raises(ctl.Stopped) as stopped:
        trainer.train(1)
    assert stopped.value.exit_code == 143 and not writer.rows
    with pytest.raises(ctl.UsageError, match=r"save\(\) was called in an evaluator task"):
        trainer.save()
