"""Warnings of loss spikes, and optional rollback."""

import ctl
import pytest
from small_models import every_step
from test_finiteness import BATCH, Poisoned

NAN = float("nan")


def spikes_in(values, **options):
    spike = ctl.LossSpike(**options)
    return [bool(spike.on_metrics(i, {"loss": value}, "train")) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 1, 1, 2.9], [0, 0, 0, 0]),
        ([1, 1, 1, 3.1], [0, 0, 0, 1]),
        ([1, 1, 3.1, 1], [0, 0, 0, 0]),  # too few values before it
        ([1, 1, 1, 9, 9, 1], [0, 0, 0, 1, 1, 0]),  # a spike does not count in the median
        ([1, NAN, 1, 1, 9], [0, 0, 0, 0, 1]),
        ([-2, -2, -2, -1, 2.1], [0, 0, 0, 0, 1]),  # 2 (|median|) times (factor - 1) above
        ([0, 0, 0, 0.1], [0, 0, 0, 1]),
    ],
)
def test_a_value_far_above_the_median_of_previous_values_is_a_spike(values, expected):
    assert spikes_in(values) == [bool(e) for e in expected]


def test_only_the_window_counts():
    assert spikes_in([1, 1, 1, 2, 2, 2, 5], window=3) == [False] * 7
    assert spikes_in([1, 1, 1, 2, 2, 5], window=6)[-1]


def test_evaluations_are_not_monitored():
    spike = ctl.LossSpike()
    assert not any(spike.on_metrics(i, {"loss": 10.0**i}, "eval") for i in range(6))


@pytest.mark.parametrize("options", [{"factor": 1.0}, {"factor": "3"}, {"window": 2}, {"window": 2.5}])
def test_bad_settings_are_refused(options):
    with pytest.raises(ctl.UsageError, match=f"LossSpike {next(iter(options))} is"):
        ctl.LossSpike(**options)


class Jumping(Poisoned):
    """The loss of an example of the fourth batch is 1000."""

    factor, rollback = 1000.0, False

    def build(self):
        super().build()
        self.callbacks.append(ctl.LossSpike(factor=3.0, rollback=self.rollback))


def test_a_spike_is_a_warning_and_training_continues(caplog):
    trainer = Jumping(strategy="default", global_batch_size=BATCH, intervals=every_step(), writers=[])
    trainer.train(8)
    assert trainer.step == 8
    assert [m for m in caplog.messages if "loss jumped to" in m and m.startswith("Step 4")]


def test_with_rollback_the_run_returns_to_the_newest_checkpoint(tmp_path, caplog):
    class RollingBack(Jumping):
        rollback = True

    writer = ctl.MemoryWriter()
    trainer = RollingBack(
        strategy="default", global_batch_size=BATCH, writers=[writer], model_dir=tmp_path,
        intervals=every_step(save=ctl.Every(steps=2)),
    )  # fmt: skip
    trainer.train(6)
    steps = [step for run, step, _ in writer.rows if run == "train"]
    assert steps == [1, 2, 3, 4, 3, 4, 5, 6]
    assert any("rolling back to the checkpoint of step 2" in m for m in caplog.messages)
