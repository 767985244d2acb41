"""`profile="3:6"`: a trace of these steps and no others, in a training that it does not change."""

import ctl
import pytest
from ctl import config
from ctl.callbacks.schedule import Intervals
from small_models import Small, digest, traced_steps


def trained(steps=8, **options):
    options = {"strategy": "default", "writers": [], "intervals": Intervals(steps_per_loop=4), **options}
    trainer = Small(**options)
    trainer.train(steps)
    return trainer


def test_the_steps_between_are_traced_where_tensorboard_looks_and_training_is_unchanged(tmp_path):
    traced = trained(model_dir=str(tmp_path / "run"), profile="3:6")
    (found,) = (tmp_path / "run").rglob("*.xplane.pb")
    where = tmp_path / "run" / "logs" / "train" / "plugins" / "profile" / "steps_3-6"
    assert found == where / "worker_0.xplane.pb" and traced_steps(found) == {4, 5, 6}
    assert digest(traced) == digest(trained())


def test_a_run_that_ends_or_begins_between_traces_its_own_part(tmp_path):
    directory = str(tmp_path / "run")
    trained(steps=4, model_dir=directory, profile="2:6")
    (found,) = (tmp_path / "run").rglob("*.xplane.pb")
    assert traced_steps(found) == {3, 4}
    trained(steps=8, model_dir=directory, profile="2:6")
    assert traced_steps(found) == {5, 6}


@pytest.mark.parametrize("value", ["100", "5:5", "6:5", ":5", "5:", "a:b", "1:2:3", "-1:4", 7])
def test_a_range_that_cannot_be_is_refused(value):
    with pytest.raises(ctl.UsageError, match="profile is .* first:last.*profile='100:110'"):
        config.Config(profile=value)


def test_a_trace_without_a_place_is_refused_before_anything_is_built():
    class Unbuilt(Small):
        def build(self):
            raise AssertionError("built")

    with pytest.raises(ctl.UsageError, match=r"no model_dir.*Give --model_dir"):
        Unbuilt(strategy="default", profile="3:6").train(8)
