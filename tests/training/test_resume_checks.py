"""What may differ when a run goes on, and what may not."""

from types import SimpleNamespace

import pytest
from ctl.checkpoints.protocol import Manifest
from ctl.data.batches import Batches
from ctl.errors import UsageError
from ctl.training.resume import check_configuration

BEFORE = Manifest(
    step=5, created=0.0, data={"seed": 0, "source": "10 examples"}, world={"global_batch_size": 8},
    config={"learning_rate": 0.1, "workers": 2},
)  # fmt: skip


def check(*, seed=0, batch=8, source="10 examples", certain=True, allow=False, **config):
    trainer = SimpleNamespace(
        seed=seed, global_batch_size=batch, allow_config_change=allow,
        topology=SimpleNamespace(is_chief=True),
    )  # fmt: skip
    batches = Batches(
        iterator=None, steps=None, ends_unknown=False, steps_per_epoch=None, mode="indexed",
        description=source, certain=certain,
    )  # fmt: skip
    check_configuration(trainer, BEFORE, batches, {"learning_rate": 0.1, "workers": 2, **config})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 1}, "seed: 0 before, 1 now"),
        ({"batch": 16}, "global_batch_size: 8 before, 16 now"),
        ({"source": "12 examples"}, "train_data: 10 examples before, 12 examples now"),
    ],
)
def test_another_order_of_the_data_is_refused_unless_allowed(changed, words, caplog):
    with pytest.raises(UsageError, match=words):
        check(**changed)
    check(**changed, allow=True)
    assert words in caplog.text


def test_workers_may_differ_in_number_and_other_settings_are_shown(caplog):
    check(workers=4)
    assert not caplog.messages
    check(learning_rate=0.2)
    assert "learning_rate: 0.1 before, 0.2 now" in caplog.text


def test_workers_at_their_own_speed_have_no_order_to_keep():
    check(source="10 examples, every batch to one of 3 workers", certain=False)
