"""Which value of a setting holds: the flag's, the keyword's, the class's or the table's, in this order."""

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


def ran(monkeypatch, kind, arguments, keywords):
    """The trainer that `ctl.run` would train."""
    made = []
    values = flags.FlagValues()
    define_flags(values)
    app.parse(["program", *arguments], values)
    monkeypatch.setattr(flags, "FLAGS", values)
    monkeypatch.setattr(kind, "prepare", lambda self: None)
    monkeypatch.setattr(kind, "train", lambda self, *_, **how: made.append(self))
    app._main(kind, keywords)
    return made[0]


def value_of(trainer, name):
    return strategy_name(trainer.strategy) if name == "strategy" else getattr(trainer, name)


def test_every_setting_of_the_trainer_is_here():
    """Those that the trainer keeps as attributes; the others become its parts."""
    mine = vars(Small(strategy="default"))
    assert sorted(CASES) == sorted(name for name in config.NAMES if name in mine)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", ["flag", "keyword", "constructor", "class", "table"])
def test_the_flag_comes_first_then_keyword_class_and_table(monkeypatch, tmp_path, name, level):
    def here(value):
        return value.replace("{tmp}", str(tmp_path)) if isinstance(value, str) else value

    text, of_flag, of_keyword, of_class = map(here, CASES[name])

    class Own(Small):
        pass

    place = str(tmp_path / "class")

    class Signed(Small):
        def __init__(self, model_dir=place, strategy="one_device", global_batch_size=24, seed=5, **options):
            super().__init__(model_dir=model_dir, strategy=strategy, global_batch_size=global_batch_size,
                             seed=seed, **options)  # fmt: skip

    base = [] if name == "strategy" else ["--strategy=default"]
    kind, arguments, keywords, expected = Own, base, {}, DEFAULTS.get(name)
    if level != "table":
        expected = {"flag": of_flag, "keyword": of_keyword}.get(level, of_class)
        if level == "constructor" and name not in config.CONSTRUCTOR_SETTINGS:
            pytest.skip("no argument of the constructor")
        kind = Signed if level == "constructor" else Own
        if level != "constructor":
            setattr(Own, name, of_class)
        keywords = {name: of_keyword} if level in ("flag", "keyword") else {}
        arguments = [f"--{name}={text}", *base] if level == "flag" else base
    elif name == "strategy":
        pytest.skip("auto depends on the machine")
    assert value_of(ran(monkeypatch, kind, [*arguments, "--export=none"], keywords), name) == expected


def test_a_word_of_the_table_may_be_an_argument_of_ones_own(monkeypatch):
    class Own(Small):
        def __init__(self, keep=0.9, jit_compile="my own", **options):
            super().__init__(**options)
            self.given = keep, jit_compile

    made = ran(monkeypatch, Own, ["--strategy=default", "--export=none"], {"keep": 0.5})
    assert made.given == (0.5, "my own")


def test_objects_for_intervals_hold_but_for_the_flags_that_are_given(monkeypatch):
    mine = ctl.Intervals(log=ctl.Every(steps=3), save=ctl.Every(secs=9.0), steps_per_loop=2)
    arguments = ["--strategy=default", "--export=none", "--log_every_steps=7"]
    made = ran(monkeypatch, Small, arguments, {"intervals": mine}).intervals
    assert (made.log.steps, made.save.secs, made.steps_per_loop) == (7, 9.0, 2)


@pytest.mark.parametrize(("arguments", "keywords", "expected"), [
    (["--jit_compile"], {}, "step"), (["--nojit_compile"], {"jit_compile": True}, "off"),
    (["--jit_compile=true"], {}, "step"), (["--jit_compile=loop"], {"jit_compile": False}, "loop"),
    ([], {"jit_compile": True}, "step"), ([], {"jit_compile": False}, "off"),
])  # fmt: skip
def test_jit_compile_is_a_word_or_a_switch(monkeypatch, arguments, keywords, expected):
    base = ["--strategy=default", "--export=none"]
    assert ran(monkeypatch, Small, [*arguments, *base], keywords).jit_compile == expected
    values = flags.FlagValues()
    define_flags(values)
    values(["program", *arguments])
    again = flags.FlagValues()
    define_flags(again)
    again(["program", values["jit_compile"].serialize()])
    assert again.jit_compile == values.jit_compile


def test_a_property_of_a_class_is_no_default(monkeypatch):
    class Own(Small):
        @property
        def init_from(self):
            return None

        @init_from.setter
        def init_from(self, value):
            assert value is None

    assert ran(monkeypatch, Own, ["--strategy=default", "--export=none"], {}).init_from is None


# three values of each kind, as text and as value; none is a default
OTHERS = {"text": ("a", "b", "c"), "real": (1.5, 2.5, 3.5), "number": (11, 12, 13),
          "positive": (11, 12, 13), "steps": (11, 12, 13), "range": ("1:2", "3:4", "5:6"),
          "list": (("cpu:0",), ("cpu:1",), ("gpu:0",))}  # fmt: skip


def three(name):
    kind, words = (config.FIELDS[name].metadata[k] for k in ("type", "choices"))
    if kind in ("choice", "compile"):
        return (*words, *words[1:])[1:4]
    return (True, True, True) if kind == "bool" else OTHERS[kind]


@pytest.mark.parametrize("name", config.NAMES)
def test_one_rule_of_precedence_holds_for_every_setting(name):
    """The flag, the keyword, what a Config gives, the class, the field: each hides those after it."""
    of_flag, of_keyword, of_class = three(name)
    plain, default = type("Plain", (Small,), {}), config.FIELDS[name].default
    classy = type("Classy", (Small,), {name: of_class})

    def found(kind, arguments=(), keywords=None):
        values = flags.FlagValues()
        define_flags(values)
        values(["program", *arguments])
        settings, _ = config.read_command_line(values, keywords or {}, kind)
        return getattr(config.resolve_config(kind, settings), name)

    text = ",".join(of_flag) if isinstance(of_flag, tuple) else str(of_flag).lower() \
        if isinstance(of_flag, bool) else of_flag  # fmt: skip
    assert found(classy, [f"--{name}={text}"], {name: of_keyword}) == of_flag
    assert found(classy, (), {name: of_keyword}) == of_keyword
    assert found(classy) == of_class and found(plain) == default
    given = config.Config(**{name: of_keyword})
    assert getattr(config.resolve_config(classy, given), name) == of_keyword
    assert getattr(config.resolve_config(classy, given, {name: of_flag}), name) == of_flag
    assert getattr(config.resolve_config(classy, config.Config()), name) == of_class
    if isinstance(default, bool):  # what is given as the default is given
        assert found(classy, [f"--no{name}"]) is False
        assert getattr(config.resolve_config(classy, config.Config(**{name: False})), name) is False


def test_keywords_and_a_config_make_the_same_trainer(tmp_path):
    one = Small(model_dir=tmp_path, strategy="default", dropout=0.1, save_every_steps=3, keep="2")
    given = ctl.Config(model_dir=str(tmp_path), strategy="default", save_every_steps=3, keep="2")
    two = Small(config=given, dropout=0.1)
    assert {**vars(one.config)} == {**vars(two.config)} | {"_explicit_names": one.config.explicit_names}
    for made in (one, two):
        assert made.intervals.save.steps == 3 and made._checkpoints.keep.newest == 2
        assert made.model_dir == str(tmp_path) and made.dropout == 0.1


@pytest.mark.parametrize(("keywords", "words"), [
    ({"modeldir": "a"}, ["Small", "modeldir", "Write model_dir="]), ({"zzz": 1}, ["zzz", "no setting"]),
    ({"seed": -1}, ["seed is -1", "whole number >= 0"]), ({"seed": 2**32}, ["seed", "<= 4294967295"]),
    ({"global_batch_size": 2.5}, ["global_batch_size is 2.5"]), ({"jit_compile": 1}, ["or True or False"]),
    ({"strategy": "mirorred"}, ["is 'mirorred'", "mirrored"]), ({"keep": 3}, ["keep is 3", "a string"]),
    ({"step_timeout_secs": float("nan")}, ["step_timeout_secs is nan", ">= 0"]),
    ({"steps_per_loop": "many"}, ["steps_per_loop is 'many'"]), ({"config": {}}, ["expected a ctl.Config"]),
    ({"devices": [0]}, ["devices", "list of names"]),
])  # fmt: skip
def test_a_setting_that_cannot_be_is_refused_with_what_to_write(keywords, words):
    with pytest.raises(ctl.UsageError) as raised:
        Small(**keywords)
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_config_is_frozen_and_can_be_copied():
    import copy
    import dataclasses
    import pickle

    made = ctl.Config(seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seed = 4
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert same == made and same.explicit_names == {"seed"}
    assert dataclasses.replace(made, seed=5).seed == 5
    with pytest.raises(ctl.UsageError, match="Write seed="):
        ctl.Config(sed=1)


def test_help_and_editors_see_every_setting_of_the_constructor():
    import inspect

    found = inspect.signature(ctl.Trainer).parameters
    assert set(config.NAMES) - set(config.RUN_SETTINGS) <= set(found)
    assert found["global_batch_size"].default == 128 and "settings" not in found


def test_config_json_holds_every_setting(tmp_path):
    import json

    Small(model_dir=tmp_path, strategy="default", writers=[], save_every_steps=7).train(1)
    settings = json.loads((tmp_path / "config.json").read_text())["settings"]
    assert sorted(settings) == sorted(config.NAMES)
    assert (settings["save_every_steps"], settings["strategy"]) == (7, "default")


@pytest.mark.parametrize(("given", "expected"), [({}, "rollback"), ({"on_nonfinite": "skip"}, "skip")])
def test_what_is_given_for_infinite_gradients_wins_over_what_build_has_made(given, expected):
    class Clips(Small):
        def build(self):
            super().build()
            self.gradients = ctl.Gradients(clip_norm=1.0, on_nonfinite="rollback")

    trainer = Clips(strategy="default", **given)
    trainer.prepare()
    assert (trainer.gradients.on_nonfinite, trainer.gradients.clip_norm) == (expected, 1.0)


def test_an_attribute_of_a_class_with_the_name_of_a_setting_is_refused_unless_it_is_one():
    class Own(Small):
        keep = 0.9

    with pytest.raises(ctl.UsageError, match=r"Own.keep is 0.9; expected a string. keep is a setting"):
        Own(strategy="default")
