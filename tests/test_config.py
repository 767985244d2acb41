"""Precedence of the values of a setting: flag, keyword, class attribute, default of the table."""

import ctl
import pytest
from absl import flags
from ctl import app, config
from ctl.config_flags import define_flags
from ctl.distribute.strategy_kind import strategy_name
from small_models import BATCH, Small

# setting -> (as a flag, its value, other values for a keyword and for a class)
CASES = {
    "model_dir": ("{tmp}/flag", "{tmp}/flag", "{tmp}/keyword", "{tmp}/class"),
    "strategy": ("default", "default", "one_device", "one_device"),
    "global_batch_size": ("8", 8, 12, 24),
    "seed": ("3", 3, 4, 5),
    "init_from": ("a", "a", "b", "c"),
    "evaluate_ema": ("true", True, False, False),
    "jit_compile": ("false", "off", "loop", "step"),
    "check_collectives": ("false", False, True, True),
    "step_timeout_secs": ("30", 30.0, 40.0, 50.0),
    "allow_config_change": ("false", False, True, True),
    "data_position": ("skip", "skip", "indexed", "iterator"),
}
DEFAULTS = {"model_dir": None, "global_batch_size": BATCH, "seed": 0, "init_from": None,
            "evaluate_ema": True, "jit_compile": "off", "check_collectives": False,
            "step_timeout_secs": 0.0, "allow_config_change": False, "data_position": "auto"}  # fmt: skip


def trainer_of_run(monkeypatch, trainer_class, arguments, keywords):
    """Returns the trainer that `ctl.run` would train."""
    trainers = []
    values = flags.FlagValues()
    define_flags(values)
    app.parse(["program", *arguments], values)
    monkeypatch.setattr(flags, "FLAGS", values)
    monkeypatch.setattr(trainer_class, "prepare", lambda self: None)
    monkeypatch.setattr(trainer_class, "train", lambda self, *_, **options: trainers.append(self))
    app._main(trainer_class, keywords)
    return trainers[0]


def value_of(trainer, name):
    return strategy_name(trainer.strategy) if name == "strategy" else getattr(trainer, name)


def test_the_cases_contain_every_setting_that_is_an_attribute_of_the_trainer():
    attributes = vars(Small(strategy="default"))
    assert sorted(CASES) == sorted(name for name in config.NAMES if name in attributes)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", ["flag", "keyword", "constructor", "class", "table"])
def test_the_flag_comes_first_then_keyword_class_and_table(monkeypatch, tmp_path, name, level):
    def expand_tmp(value):
        return value.replace("{tmp}", str(tmp_path)) if isinstance(value, str) else value

    text, of_flag, of_keyword, of_class = map(expand_tmp, CASES[name])

    class CustomTrainer(Small):
        pass

    class_model_dir = str(tmp_path / "class")

    class TrainerWithArguments(Small):
        def __init__(
            self, model_dir=class_model_dir, strategy="one_device", global_batch_size=24, seed=5, **options
        ):
            super().__init__(model_dir=model_dir, strategy=strategy, global_batch_size=global_batch_size,
                             seed=seed, **options)  # fmt: skip

    base = [] if name == "strategy" else ["--strategy=default"]
    trainer_class, arguments, keywords, expected = CustomTrainer, base, {}, DEFAULTS.get(name)
    if level != "table":
        expected = {"flag": of_flag, "keyword": of_keyword}.get(level, of_class)
        if level == "constructor" and name not in config.CONSTRUCTOR_SETTINGS:
            pytest.skip("no argument of the constructor")
        trainer_class = TrainerWithArguments if level == "constructor" else CustomTrainer
        if level != "constructor":
            setattr(CustomTrainer, name, of_class)
        keywords = {name: of_keyword} if level in ("flag", "keyword") else {}
        arguments = [f"--{name}={text}", *base] if level == "flag" else base
    elif name == "strategy":
        pytest.skip("auto depends on the machine")
    assert (
        value_of(trainer_of_run(monkeypatch, trainer_class, [*arguments, "--export=none"], keywords), name)
        == expected
    )


def test_the_name_of_a_setting_may_be_an_argument_of_the_users_constructor(monkeypatch):
    class CustomTrainer(Small):
        def __init__(self, keep=0.9, jit_compile="my own", **options):
            super().__init__(**options)
            self.received = keep, jit_compile

    trainer = trainer_of_run(
        monkeypatch, CustomTrainer, ["--strategy=default", "--export=none"], {"keep": 0.5}
    )
    assert trainer.received == (0.5, "my own")


def test_an_intervals_object_holds_except_for_given_flags(monkeypatch):
    intervals = ctl.Intervals(log=ctl.Every(steps=3), save=ctl.Every(secs=9.0), steps_per_loop=2)
    arguments = ["--strategy=default", "--export=none", "--log_every_steps=7"]
    merged = trainer_of_run(monkeypatch, Small, arguments, {"intervals": intervals}).intervals
    assert (merged.log.steps, merged.save.secs, merged.steps_per_loop) == (7, 9.0, 2)


@pytest.mark.parametrize(("arguments", "keywords", "expected"), [
    (["--jit_compile"], {}, "step"), (["--nojit_compile"], {"jit_compile": True}, "off"),
    (["--jit_compile=true"], {}, "step"), (["--jit_compile=loop"], {"jit_compile": False}, "loop"),
    ([], {"jit_compile": True}, "step"), ([], {"jit_compile": False}, "off"),
])  # fmt: skip
def test_jit_compile_is_a_string_or_a_boolean(monkeypatch, arguments, keywords, expected):
    base = ["--strategy=default", "--export=none"]
    assert trainer_of_run(monkeypatch, Small, [*arguments, *base], keywords).jit_compile == expected
    values = flags.FlagValues()
    define_flags(values)
    values(["program", *arguments])
    restored_flags = flags.FlagValues()
    define_flags(restored_flags)
    restored_flags(["program", values["jit_compile"].serialize()])
    assert restored_flags.jit_compile == values.jit_compile


def test_a_property_of_a_class_is_no_default(monkeypatch):
    class CustomTrainer(Small):
        @property
        def init_from(self):
            return None

        @init_from.setter
        def init_from(self, value):
            assert value is None

    assert (
        trainer_of_run(monkeypatch, CustomTrainer, ["--strategy=default", "--export=none"], {}).init_from
        is None
    )


# three values of each type; none is a default
VALUES_BY_TYPE = {"text": ("a", "b", "c"), "real": (1.5, 2.5, 3.5), "number": (11, 12, 13),
          "positive": (11, 12, 13), "steps": (11, 12, 13), "range": ("1:2", "3:4", "5:6"),
          "list": (("cpu:0",), ("cpu:1",), ("gpu:0",)),
          "names": (("console",), ("jsonl",), ("mlflow", "wandb"))}  # fmt: skip


def three_values(name):
    setting_type, choices = (config.FIELDS[name].metadata[k] for k in ("type", "choices"))
    if setting_type in ("choice", "compile"):
        return (*choices, *choices[1:])[1:4]
    return (True, True, True) if setting_type == "bool" else VALUES_BY_TYPE[setting_type]


@pytest.mark.parametrize("name", config.NAMES)
def test_one_rule_of_precedence_holds_for_every_setting(name):
    """Order of precedence: flag, keyword, Config, class attribute, default of the field."""
    of_flag, of_keyword, of_class = three_values(name)
    without_attribute, default = type("Plain", (Small,), {}), config.FIELDS[name].default
    with_attribute = type("Classy", (Small,), {name: of_class})

    def value_of_setting(trainer_class, arguments=(), keywords=None):
        values = flags.FlagValues()
        define_flags(values)
        values(["program", *arguments])
        settings, _ = config.read_command_line(values, keywords or {}, trainer_class)
        return getattr(config.resolve_config(trainer_class, settings), name)

    text = ",".join(of_flag) if isinstance(of_flag, tuple) else str(of_flag).lower() \
        if isinstance(of_flag, bool) else of_flag  # fmt: skip
    assert value_of_setting(with_attribute, [f"--{name}={text}"], {name: of_keyword}) == of_flag
    assert value_of_setting(with_attribute, (), {name: of_keyword}) == of_keyword
    assert value_of_setting(with_attribute) == of_class and value_of_setting(without_attribute) == default
    config_object = config.Config(**{name: of_keyword})
    assert getattr(config.resolve_config(with_attribute, config_object), name) == of_keyword
    if name not in config.RUN_SETTINGS:
        resolved = config.resolve_config(with_attribute, config_object, {name: of_flag})
        assert getattr(resolved, name) == of_flag
    assert getattr(config.resolve_config(with_attribute, config.Config()), name) == of_class
    if isinstance(default, bool):  # an explicit value counts, even if it equals the default
        assert value_of_setting(with_attribute, [f"--no{name}"]) is False
        assert getattr(config.resolve_config(with_attribute, config.Config(**{name: False})), name) is False


def test_keywords_and_a_config_make_the_same_trainer(tmp_path):
    from_keywords = Small(model_dir=tmp_path, strategy="default", dropout=0.1, save_every_steps=3, keep="2")
    trainer_config = ctl.Config(model_dir=str(tmp_path), strategy="default", save_every_steps=3, keep="2")
    from_config = Small(config=trainer_config, dropout=0.1)
    assert {**vars(from_keywords.config)} == {**vars(from_config.config)} | {
        "_explicit_names": from_keywords.config.explicit_names
    }
    for trainer in (from_keywords, from_config):
        assert trainer.intervals.save.steps == 3 and trainer._checkpoints.keep.newest == 2
        assert trainer.model_dir == str(tmp_path) and trainer.dropout == 0.1


@pytest.mark.parametrize(("keywords", "expected_texts"), [
    ({"modeldir": "a"}, ["Small", "modeldir", "Write model_dir="]), ({"zzz": 1}, ["zzz", "not a setting"]),
    ({"seed": -1}, ["seed is -1", "whole number >= 0"]), ({"seed": 2**32}, ["seed", "<= 4294967295"]),
    ({"global_batch_size": 2.5}, ["global_batch_size is 2.5"]), ({"jit_compile": 1}, ["or True or False"]),
    ({"strategy": "mirorred"}, ["is 'mirorred'", "mirrored"]), ({"keep": 3}, ["keep is 3", "a string"]),
    ({"step_timeout_secs": float("nan")}, ["step_timeout_secs is nan", ">= 0"]),
    ({"steps_per_loop": "many"}, ["steps_per_loop is 'many'"]), ({"config": {}}, ["expected a ctl.Config"]),
    ({"devices": [0]}, ["devices", "list of names"]),
])  # fmt: skip
def test_an_invalid_setting_is_refused_with_the_expected_values(keywords, expected_texts):
    with pytest.raises(ctl.UsageError) as raised:
        Small(**keywords)
    assert all(text in str(raised.value) for text in expected_texts), raised.value


def test_a_config_is_frozen_and_can_be_copied():
    import copy
    import dataclasses
    import pickle

    original = ctl.Config(seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        original.seed = 4
    for duplicate in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert duplicate == original and duplicate.explicit_names == {"seed"}
    assert dataclasses.replace(original, seed=5).seed == 5
    with pytest.raises(ctl.UsageError, match="Write seed="):
        ctl.Config(sed=1)


def test_the_signature_of_the_constructor_contains_every_setting():
    import inspect

    parameters = inspect.signature(ctl.Trainer).parameters
    assert set(config.NAMES) - set(config.RUN_SETTINGS) <= set(parameters)
    assert parameters["global_batch_size"].default == 128 and "settings" not in parameters


def test_config_json_holds_every_setting(tmp_path):
    import json

    Small(model_dir=tmp_path, strategy="default", writers=[], save_every_steps=7).train(1)
    settings = json.loads((tmp_path / "config.json").read_text())["settings"]
    assert sorted(settings) == sorted(config.NAMES)
    assert (settings["save_every_steps"], settings["strategy"]) == (7, "default")


@pytest.mark.parametrize(("options", "expected"), [({}, "rollback"), ({"on_nonfinite": "skip"}, "skip")])
def test_the_option_on_nonfinite_precedes_the_gradients_of_build(options, expected):
    class Clips(Small):
        def build(self):
            super().build()
            self.gradients = ctl.Gradients(clip_norm=1.0, on_nonfinite="rollback")

    trainer = Clips(strategy="default", **options)
    trainer.prepare()
    assert (trainer.gradients.on_nonfinite, trainer.gradients.clip_norm) == (expected, 1.0)


def test_an_attribute_of_a_class_with_the_name_of_a_setting_is_refused_unless_it_is_one():
    class CustomTrainer(Small):
        keep = 0.9

    with pytest.raises(
        ctl.UsageError, match=r"CustomTrainer.keep is 0.9; expected a string. keep is a setting"
    ):
        CustomTrainer(strategy="default")
