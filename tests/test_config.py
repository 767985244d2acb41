"""Which value of a setting holds: the flag's, the keyword's, the class's or the table's, in this order."""

import ctl
import pytest
from absl import flags
from ctl import app, config
from ctl.distribute import strategies
from small_models import Small

# setting -> (as a flag, its value, other values for a keyword and for a class)
CASES = {
    "model_dir": ("{tmp}/flag", "{tmp}/flag", "{tmp}/keyword", "{tmp}/class"),
    "strategy": ("default", "default", "one_device", "one_device"),
    "global_batch_size": ("8", 8, 12, 24),
    "seed": ("3", 3, 4, 5),
    "init_from": ("a", "a", "b", "c"),
    "jit_compile": ("false", False, True, True),
    "check_collectives": ("false", False, True, True),
    "step_timeout_secs": ("30", 30.0, 40.0, 50.0),
    "allow_config_change": ("false", False, True, True),
}
DEFAULTS = {"model_dir": None, "global_batch_size": 128, "seed": 0, "init_from": None, "jit_compile": False,
            "check_collectives": False, "step_timeout_secs": 0.0, "allow_config_change": False}  # fmt: skip


def ran(monkeypatch, kind, arguments, keywords):
    """The trainer that `ctl.run` would train."""
    made = []
    values = flags.FlagValues()
    config.define_flags(values)
    app.parse(["program", *arguments], values)
    monkeypatch.setattr(flags, "FLAGS", values)
    monkeypatch.setattr(kind, "prepare", lambda self: None)
    monkeypatch.setattr(kind, "train", lambda self, *_, **how: made.append(self))
    app._main(kind, keywords)
    return made[0]


def value_of(trainer, name):
    return strategies.word_of(trainer.strategy) if name == "strategy" else getattr(trainer, name)


def test_every_setting_of_the_trainer_is_here():
    assert sorted(CASES) == sorted(config.OF_TRAINER)


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
        def __init__(
            self, model_dir=place, strategy="one_device", global_batch_size=24, seed=5, **options
        ):
            super().__init__(model_dir=model_dir, strategy=strategy, global_batch_size=global_batch_size,
                             seed=seed, **options)  # fmt: skip

    base = [] if name == "strategy" else ["--strategy=default"]
    kind, arguments, keywords, expected = Own, base, {}, DEFAULTS.get(name)
    if level != "table":
        expected = {"flag": of_flag, "keyword": of_keyword}.get(level, of_class)
        if level == "constructor" and name not in config.OF_CONSTRUCTOR:
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


def test_a_property_of_a_class_is_no_default(monkeypatch):
    class Own(Small):
        @property
        def init_from(self):
            return None

        @init_from.setter
        def init_from(self, value):
            assert value is None

    assert ran(monkeypatch, Own, ["--strategy=default", "--export=none"], {}).init_from is None
