"""Gradients in groups: from the last layer to the first, small ones at the end."""

import pytest
import tensorflow as tf
from ctl.step.buckets import in_buckets

KB = 1 << 10


def sized(*kilobytes):
    return [tf.zeros([n * KB // 4]) for n in kilobytes]


def test_all_go_together_without_a_bucket():
    assert in_buckets(sized(100, 1, 200), 0) == [[0, 1, 2]]


def test_groups_begin_with_the_last_layer_and_are_at_least_as_large_as_a_bucket():
    assert in_buckets(sized(100, 200, 300, 100, 400), 350 * KB) == [[4], [2, 3], [0, 1]]


@pytest.mark.parametrize("kilobytes", [(100, 1, 200, 64), (64, 100, 1, 200)])
def test_small_tensors_are_in_the_last_group(kilobytes):
    groups = in_buckets(sized(*kilobytes), 150 * KB)
    assert groups[0] == [kilobytes.index(200)]
    assert groups[1] == [i for i in range(4) if kilobytes[i] != 200]


def test_each_is_in_one_group():
    for bucket in (1, 100 * KB, 10**9):
        groups = in_buckets(sized(1, 70, 80, 2, 90, 64, 65), bucket)
        assert sorted(sum(groups, [])) == list(range(7)) and all(groups)


def test_what_is_of_unknown_size_is_in_the_last_group():
    groups = []

    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([100 * KB])])
    def grouped(*tensors):
        groups.extend(in_buckets([*tensors, tensors[1]], 1))

    grouped.get_concrete_function()
    assert groups == [[2], [1], [0]]
