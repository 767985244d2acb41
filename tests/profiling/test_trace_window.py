"""Traces of a range of steps, such as `profile="3:6"`, without changes of the training."""

import ctl
import pytest
from ctl import config
from ctl.callbacks.schedule import Intervals
from small_models import Small, digest, traced_steps


def run_training(steps=8, **options):
    options = {"strategy": "default", "writers": [], "intervals": Intervals(steps_per_loop=4), **options}
    trainer = Small(**options)
    trainer.train(steps)
    return trainer


def test_the_steps_of_the_range_are_traced_for_tensorboard_and_training_is_unchanged(tmp_path):
    profiled = run_training(model_dir=str(tmp_path / "run"), profile="3:6")
    (trace,) = (tmp_path / "run").rglob("*.xplane.pb")
    directory = tmp_path / "run" / "logs" / "train" / "plugins" / "profile" / "steps_3-6"
    assert trace == directory / "worker_0.xplane.pb" and traced_steps(trace) == {4, 5, 6}
    assert digest(profiled) == digest(run_training())


def test_a_run_that_ends_or_begins_in_the_range_traces_its_part(tmp_path):
    directory = str(tmp_path / "run")
    run_training(steps=4, model_dir=directory, profile="2:6")
    (trace,) = (tmp_path / "run").rglob("*.xplane.pb")
    assert traced_steps(trace) == {3, 4}
    run_training(steps=8, model_dir=directory, profile="2:6")
    assert traced_steps(trace) == {5, 6}


@pytest.mark.parametrize("value", ["100", "5:5", "6:5", ":5", "5:", "a:b", "1:2:3", "-1:4", 7])
def test_an_invalid_range_is_refused(value):
    with pytest.raises(ctl.UsageError, match="profile is .* first:last.*profile='100:110'"):
        config.Config(profile=value)


def test_a_trace_without_a_model_dir_is_refused_before_build():
    class Unbuilt(Small):
        def build(self):
            raise AssertionError("built")

    with pytest.raises(ctl.UsageError, match=r"no model_dir.*Give --model_dir"):
        Unbuilt(strategy="default", profile="3:6").train(8)
