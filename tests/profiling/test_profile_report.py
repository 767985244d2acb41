"""Report of `ctl profile`: parts of a step, times of each worker, and one sentence of advice."""

import dataclasses
import json
import math

import pytest
from ctl.profiling.profile_report import StepProfile, WorkerTimes, advice, profile_text

ONE_DEVICE = StepProfile(
    model="Mnist", step=120, replicas=1, global_batch_size=128, steps_per_loop=50, jit_compile=True,
    times=(WorkerTimes(graph_call=0.010, host=0.0, communication=0.0, input_wait=0.0),),
)  # fmt: skip
TWO_WORKERS = dataclasses.replace(
    ONE_DEVICE,
    replicas=2,
    times=(
        WorkerTimes(graph_call=0.010, host=0.0, communication=0.007, input_wait=0.0),
        WorkerTimes(graph_call=0.010, host=0.0, communication=0.004, input_wait=0.001),
    ),
)


def with_times(profile, **fields):
    """Returns the profile with changed times of all workers."""
    times = tuple(dataclasses.replace(worker, **fields) for worker in profile.times)
    return dataclasses.replace(profile, times=times)


def with_fields(profile, **fields):
    return dataclasses.replace(profile, **fields)


UNKNOWN = with_times(ONE_DEVICE, communication=math.nan, input_wait=math.nan)


@pytest.mark.parametrize(
    ("profile", "step_secs"),
    [(ONE_DEVICE, 0.010), (TWO_WORKERS, 0.010), (UNKNOWN, 0.010),
     (with_times(ONE_DEVICE, input_wait=0.004, host=0.1), 0.110),
     (with_fields(TWO_WORKERS, one_save=1.0, save_every=50), 0.030),
     (with_fields(TWO_WORKERS, one_save=1.0), 0.010)],
)  # fmt: skip
def test_parts_are_not_negative_and_add_up_to_the_step(profile, step_secs):
    assert min(profile.parts().values()) >= 0
    assert sum(profile.parts().values()) == pytest.approx(profile.step_secs) == pytest.approx(step_secs)


def test_the_parts_are_those_of_the_worker_that_waits_least_for_the_others():
    assert TWO_WORKERS.slowest == 1
    parts = TWO_WORKERS.parts()
    expected = {"waiting for input": 0.001, "computing": 0.005, "communicating": 0.004, "host": 0.0}
    assert parts == pytest.approx(expected)


@pytest.mark.parametrize(
    ("profile", "texts"),
    [
        (with_times(ONE_DEVICE, input_wait=0.005),
         ["Waiting for input is 50 %", "prefetch()", "2.00 x as fast"]),
        (with_fields(with_times(ONE_DEVICE, input_wait=0.005), in_memory=True),
         ["gathered from arrays in memory", "--jit_compile=loop", "2.00 x as fast"]),
        (TWO_WORKERS,
         ["Communication is 40 % of a step: a global batch of 256", "accumulate_steps=2",
          "about 1.25 x the examples per second."]),
        (with_fields(TWO_WORKERS, can_send_16_bits=True), ["per second; wire_dtype='bfloat16' sends half"]),
        (with_fields(TWO_WORKERS, sync_every=1),
         ["--sync_every=16, which changes", "about 1.60 x as fast"]),
        (with_fields(with_times(ONE_DEVICE, host=0.01), steps_per_loop=1),
         ["Python between", "--steps_per_loop=10", "1.82 x"]),
        (with_times(ONE_DEVICE, host=0.01), ["--log_every_steps", "after_loop", "2.00 x as fast"]),
        (with_fields(ONE_DEVICE, one_save=1.0, save_every=100.0),
         ["Saving is 50 %", "--save_every_steps=200", "1.33 x as fast", "--background_save"]),
        (ONE_DEVICE, ["Computing is 100 %", "at most 2.00 x", "else try mixed precision"]),
        (with_fields(ONE_DEVICE, jit_compile=False), ["else try --jit_compile=step, mixed precision"]),
        (with_times(TWO_WORKERS, communication=0.0005),
         ["Computing is 95 %", "communication 5 %, no bottleneck"]),
        (UNKNOWN, ["Graph calls are 100 % of a step"]),
        (with_times(UNKNOWN, host=0.01), ["Python between graph calls is 50 %"]),
    ],
)  # fmt: skip
def test_the_advice_is_about_the_largest_part_and_its_gain_follows_from_the_numbers(profile, texts):
    for text in texts:
        assert text in advice(profile)
    assert advice(profile).endswith(".") and "\n" not in advice(profile)


@pytest.mark.parametrize("profile", [TWO_WORKERS, with_fields(TWO_WORKERS, can_send_16_bits=True)])
def test_16_bits_are_proposed_only_where_they_have_an_effect(profile):
    assert ("wire_dtype" in advice(profile)) == profile.can_send_16_bits


def rows(profile):
    return [" ".join(line.split()) for line in profile_text(profile).splitlines()]


def test_one_device_has_no_rows_of_communication_and_workers():
    text = profile_text(ONE_DEVICE)
    assert rows(ONE_DEVICE)[2] == "waiting for input 0.000 0 %" and "all 10.000 100 %" in rows(ONE_DEVICE)
    assert "communicating" not in text and "worker" not in text


def test_several_workers_have_a_row_each():
    assert "communicating 4.000 40 %" in rows(TWO_WORKERS)
    assert rows(TWO_WORKERS)[-4:-1] == [
        "input computing communicating host",
        "worker 0 0.000 3.000 7.000 0.000",
        "worker 1, slowest 1.000 5.000 4.000 0.000",
    ]


def test_times_that_cannot_be_measured_separately_are_one_row():
    row = "graph calls 10.000 100 % input and computing, which cannot be measured separately here"
    assert rows(UNKNOWN)[2] == row
    unknown = with_times(TWO_WORKERS, communication=math.nan)
    assert rows(unknown)[-2] == "worker 1 1.000 - - 0.000"
    content = json.loads(json.dumps(unknown.as_json(), allow_nan=False))
    assert content["workers"] == 2 and content["times"][1]["communication"] is None
