"""A loss that jumps is warned of, and undone if that was asked for."""

import ctl
import pytest
from small_models import every_step
from test_finiteness import BATCH, Poisoned

NAN = float("nan")


def warned(values, **how):
    spike = ctl.LossSpike(**how)
    return [bool(spike.on_metrics(i, {"loss": value}, "train")) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 1, 1, 2.9], [0, 0, 0, 0]),
        ([1, 1, 1, 3.1], [0, 0, 0, 1]),
        ([1, 1, 3.1, 1], [0, 0, 0, 0]),  # too few before it
        ([1, 1, 1, 9, 9, 1], [0, 0, 0, 1, 1, 0]),  # a spike is no measure for the next
        ([1, NAN, 1, 1, 9], [0, 0, 0, 0, 1]),
        ([-2, -2, -2, -1, 2.1], [0, 0, 0, 0, 1]),  # 2 (|median|) times (factor - 1) above
        ([0, 0, 0, 0.1], [0, 0, 0, 1]),
    ],
)
def test_a_value_far_above_the_median_of_those_before_is_a_spike(values, expected):
    assert warned(values) == [bool(e) for e in expected]


def test_only_the_window_counts():
    assert warned([1, 1, 1, 2, 2, 2, 5], window=3) == [False] * 7
    assert warned([1, 1, 1, 2, 2, 5], window=6)[-1]


def test_the_evaluation_is_not_watched():
    spike = ctl.LossSpike()
    assert not any(spike.on_metrics(i, {"loss": 10.0**i}, "eval") for i in range(6))


@pytest.mark.parametrize("how", [{"factor": 1.0}, {"factor": "3"}, {"window": 2}, {"window": 2.5}])
def test_bad_settings_are_refused(how):
    with pytest.raises(ctl.UsageError, match=f"LossSpike {next(iter(how))} is"):
        ctl.LossSpike(**how)


class Jumping(Poisoned):
    """The loss of an example of the fourth batch is 1000."""

    factor, rollback = 1000.0, False

    def build(self):
        super().build()
        self.callbacks.append(ctl.LossSpike(factor=3.0, rollback=self.rollback))


def test_a_spike_is_a_warning_and_training_goes_on(caplog):
    made = Jumping(strategy="default", global_batch_size=BATCH, intervals=every_step(), writers=[])
    made.train(8)
    assert made.step == 8
    assert [m for m in caplog.messages if "loss jumped to" in m and m.startswith("Step 4")]


def test_by_choice_the_run_goes_back_to_the_newest_checkpoint(tmp_path, caplog):
    class Kind(Jumping):
        rollback = True

    writer = ctl.MemoryWriter()
    made = Kind(
        strategy="default", global_batch_size=BATCH, writers=[writer], model_dir=tmp_path,
        intervals=every_step(save=ctl.Every(steps=2)),
    )  # fmt: skip
    made.train(6)
    steps = [step for run, step, _ in writer.rows if run == "train"]
    assert steps == [1, 2, 3, 4, 3, 4, 5, 6]
    assert any("rolling back to the checkpoint of step 2" in m for m in caplog.messages)
