"""Errors for unknown names of settings suggest others."""

import ctl
import pytest
from ctl import setting_names
from ctl.config import NAMES, RUN_SETTINGS
from small_models import Small

SUGGESTIONS = [
    ("max_steps", "Config got max_steps=..., which is not a setting. Write train_steps=..."),
    ("batch_size", "Write global_batch_size=..."),
    ("checkpoint_interval", "Write save_every_steps=..."),
    ("eval_steps", "Write max_eval_batches=... or eval_every_steps=..."),
    ("log_dir", "Write model_dir=..."),
    ("learning_rate", "Pass it to the optimizer."),
    ("momentum", "Pass it to the optimizer."),
    ("patience", "Pass callbacks=[ctl.EarlyStopping(...)]."),
    ("trian_steps", "which is not a setting. Write train_steps=..."),
    ("global_batchsize", "Write global_batch_size=..."),
    ("qqq", f"Expected one of {', '.join(NAMES)}."),
]


@pytest.mark.parametrize(("name", "expected_end"), SUGGESTIONS)
def test_an_unknown_name_in_a_config_is_refused_with_a_suggestion(name, expected_end):
    with pytest.raises(ctl.UsageError) as caught:
        ctl.Config(**{name: 3})
    assert str(caught.value).endswith(expected_end)


@pytest.mark.parametrize(
    ("name", "expected_end"),
    [
        ("train_steps", "train_steps=..., which is a setting of ctl.run only. Write train(steps=...)"),
        ("max_epochs", "max_epochs=..., which is not a setting. Write train(epochs=...)"),
        ("export", "Write train(export=...) or export(...)"),
        ("mode", "Write train(), evaluate(), predict(data) or export()"),
        ("verbose", f"Expected one of {', '.join(n for n in NAMES if n not in RUN_SETTINGS)}."),
    ],
)
def test_a_trainer_refuses_settings_of_run_with_the_call_to_write(name, expected_end):
    with pytest.raises(ctl.UsageError, match="^Small got ") as caught:
        Small(**{name: 3})
    assert str(caught.value).endswith(expected_end)


def test_a_config_may_have_settings_of_run():
    assert Small(config=ctl.Config(train_steps=3, strategy="default")).config.train_steps == 3


def test_names_in_other_frameworks_are_no_settings_and_lead_to_settings():
    for setting in setting_names._OTHER_NAMES:
        assert setting in NAMES
    for aliases in (*setting_names._OTHER_NAMES.values(), *setting_names._INSTEAD):
        assert not set(aliases.split()) & set(NAMES)


def test_a_name_that_the_program_defines_is_preferred():
    assert setting_names.similar_names("lr", ["learning_rate", "model_dir"]) == ["learning_rate"]
    assert setting_names.similar_names("lr", ["outer_learning_rate"]) == []
