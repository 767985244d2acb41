"""What `ctl profile` says of measurements: parts that add up, and one sentence that follows from them."""

import dataclasses

import pytest
from ctl.training.profile_report import StepProfile, advice, profile_text

ALONE = StepProfile(
    model="Mnist", step=120, workers=1, replicas=1, global_batch_size=128, steps_per_loop=50,
    wire_dtype=None, jit_compile=False, training=0.010, input_wait=0.0, cached=0.010,
)  # fmt: skip
TWO = dataclasses.replace(
    ALONE, workers=2, replicas=2, cached=0.010, alone=0.006, fastest=0.006, sums=0.005, sums_16_bit=0.003
)


def changed(profile, **fields):
    return dataclasses.replace(profile, **fields)


@pytest.mark.parametrize(
    "profile",
    [ALONE, TWO, changed(TWO, training=0.009), changed(TWO, alone=0.02),
     changed(ALONE, input_wait=0.02, host=0.1), changed(TWO, one_save=1.0, save_every=50, training=0.03)],
)  # fmt: skip
def test_parts_are_not_negative_and_add_up_to_the_whole(profile):
    assert min(profile.parts().values()) >= 0
    assert sum(profile.parts().values()) == pytest.approx(profile.whole)


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (changed(ALONE, training=0.020, input_wait=0.010),
         ["Waiting for input is 50 %", "prefetch()", "2.00 x as fast"]),
        (changed(ALONE, training=0.020, input_wait=0.010, in_memory=True),
         ["gathered from arrays in memory", "--jit_compile=loop", "2.00 x as fast"]),
        (TWO, ["Communication is 40 %", "wire_dtype='bfloat16' steps are about 1.25 x as fast",
               "batch of 256", "accumulate_steps=2", "about 1.25 x the examples"]),
        (changed(TWO, wire_dtype="bfloat16"), ["Communication is 40 % of a step: a global batch of 256"]),
        (changed(TWO, sums_16_bit=0.0051), ["wire_dtype='bfloat16' brings next to nothing"]),
        (changed(TWO, sync_every=1), ["--sync_every=16, which changes", "about 1.60 x as fast"]),
        (changed(ALONE, host=0.01, steps_per_loop=1), ["Python between", "--steps_per_loop=10", "1.82 x"]),
        (changed(ALONE, host=0.01), ["--log_every_steps", "after_loop", "2.00 x as fast"]),
        (changed(ALONE, one_save=1.0, save_every=100.0),
         ["Saving is 50 %", "--save_every_steps=200", "1.33 x as fast", "--background_save"]),
        (changed(ALONE, alone=0.010, compiled=0.005), ["Computing is 100 %", "--jit_compile", "2.00 x"]),
        (changed(TWO, alone=0.0095), ["communication 5 %, no bottleneck", "at most 1.90 x"]),
    ],
)  # fmt: skip
def test_the_advice_is_about_the_largest_part_and_its_gain_follows_from_the_numbers(profile, words):
    for text in words:
        assert text in advice(profile)
    assert advice(profile).endswith(".") and "\n" not in advice(profile)


def test_the_table_has_communication_with_replicas_only_and_says_how_much_is_hidden():
    assert "communicating" not in profile_text(ALONE)
    (line,) = (line for line in profile_text(TWO).splitlines() if "communicating" in line)
    assert " ".join(line.split()) == "communicating 4.000 40 % 5.000 ms alone; 20 % hidden behind computing"
    late = profile_text(changed(TWO, fastest=0.004))
    assert "the slowest worker takes 50 % longer" in late
