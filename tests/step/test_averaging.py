"""Means of per-example values over the global batch, on any number of replicas."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from ctl.step.averaging import Totals, average


def averaged(values, size=4, **options):
    return float(average(tf.constant(values), global_batch_size=size, **options))


def test_the_shares_of_replicas_add_up_to_numpy_s_mean():
    values = np.random.default_rng(0).normal(size=13).astype(np.float32)
    for cut in (0, 1, 6, 13):
        total = averaged(values[:cut], 13) + averaged(values[cut:], 13)
        assert total == pytest.approx(values.mean(), abs=1e-6)


def test_weights_multiply_and_the_divisor_stays_the_global_batch():
    assert averaged([1.0, 2.0, 3.0], 4, sample_weight=tf.constant([0.0, 1.0, 2.0])) == 8 / 4


def test_half_precision_and_an_empty_batch_are_averaged():
    assert averaged(np.zeros([0], np.float32)) == 0.0
    assert averaged(np.array([1, 2], np.float16), 2) == 1.5


def test_a_scalar_is_refused_with_the_cure():
    loss = keras.losses.MeanSquaredError()(tf.zeros([3, 1]), tf.ones([3, 1]))
    with pytest.raises(ctl.UsageError, match=r"scalar.*shape \[b\].*reduction=None"):
        average(loss, global_batch_size=3)


def means(*replicas, steps=1):
    """Packs the outputs of each replica's step and returns the means; a replica is (values, b)."""
    totals = Totals()
    packed = totals.zeros()
    for values, num_examples in replicas * steps:
        packed = packed + totals.pack(values, num_examples)
    return totals.means(packed.numpy())


def vector(*values, dtype=tf.float32):
    return {"x": tf.constant(values, dtype)}, len(values)


def test_every_example_counts_once_on_any_replica():
    assert means(vector(1.0, 2.0), vector(3.0)) == {"x": 2.0}  # a mean of means is 2.25
    assert means(vector(1.0, 2.0), vector(), vector(6.0)) == {"x": 3.0}


def test_means_have_the_precision_of_float32():
    assert means(vector(1.0, 0.0, 0.0)) == {"x": float(np.float32(1 / 3))}


def test_scalars_are_averaged_over_the_replicas_that_had_examples():
    assert means(({"x": tf.constant(1.0)}, 2), ({"x": tf.constant(4.0)}, 1)) == {"x": 2.5}
    assert means(({"x": tf.constant(1.0)}, 2), ({"x": tf.constant(np.nan)}, 0)) == {"x": 1.0}
    dynamic = tf.constant(0)
    assert means(({"x": 3.0}, 2), ({"x": tf.constant(np.nan)}, dynamic)) == {"x": 3.0}


@pytest.mark.parametrize("dtype", [tf.bool, tf.int32, tf.uint8, tf.float16, tf.bfloat16, tf.float64])
def test_numbers_of_any_dtype_are_averaged(dtype):
    values = {"x": tf.cast([1, 0, 0, 1], dtype)}
    assert means((values, 4)) == {"x": 0.5}
    large_batch = {"x": tf.cast(tf.ones([3000]), dtype)}
    assert means((large_batch, 3000), steps=3) == {"x": 1.0}, "the sum overflowed or was rounded"


def test_large_sums_of_small_integers_and_mixed_names_stay_apart():
    scores = {"b": tf.constant([True, False]), "a": tf.constant([3, 5]), "c": 2.0}
    assert means((scores, 2)) == {"a": 4.0, "b": 0.5, "c": 2.0}


@pytest.mark.parametrize(
    ("value", "error_pattern"),
    [
        (tf.zeros([2, 3]), r"'x' of shape \(2, 3\).*reduce_mean"),
        (tf.constant(["a", "b"]), "'x' of dtype string; expected a number"),
        (tf.zeros([2], tf.complex64), "'x' of dtype complex64"),
    ],
)
def test_values_that_cannot_be_averaged_are_refused_by_name(value, error_pattern):
    with pytest.raises(ctl.UsageError, match=error_pattern):
        Totals().pack({"x": value}, 2)


def test_names_are_strings_and_leave_gradient_norm_to_ctl():
    with pytest.raises(ctl.UsageError, match=r"names \[1\]; expected strings"):
        Totals().pack({1: tf.zeros([2])}, 2)
    with pytest.raises(ctl.UsageError, match="'gradient_norm', which ctl reports"):
        Totals().pack({"gradient_norm": tf.zeros([2])}, 2, {"gradient_norm": tf.constant(1.0)})


def test_norms_may_be_appended_later():
    norms = {"gradient_norm": tf.constant(1.0), "gradient_norm/other": tf.constant(2.0)}
    expected = {"gradient_norm": 1.0, "gradient_norm/other": 2.0, "x": 3.0}
    at_once = Totals()
    packed = at_once.pack({"x": tf.constant([3.0])}, 1, norms)
    assert at_once.means(packed.numpy()) == expected
    later = Totals()
    packed = later.append(later.pack({"x": tf.constant([3.0])}, 1), norms)
    assert later.means(packed.numpy()) == expected


def test_a_mean_does_not_depend_on_how_steps_were_cut():
    values = np.random.default_rng(0).normal(size=[1000, 3]).astype(np.float32)
    totals = Totals()
    steps = [totals.pack({"x": v}, 3).numpy() for v in values]
    results = set()
    for cut in (1, 7, 64, 1000):
        loops = [sum(steps[i : i + cut]) for i in range(0, 1000, cut)]
        results.add(totals.means(sum(loops))["x"])
    assert len(results) == 1
    assert results.pop() == pytest.approx(values.mean(), abs=1e-7)


def test_the_mean_of_no_examples_is_nan_and_no_values_give_no_means():
    assert np.isnan(means(vector())["x"])
    assert means(({}, 3)) == {}
