"""Tensors from the arrays of results, with and without a copy."""

import ml_dtypes
import numpy as np
import pytest
from ctl.collectives import memory, tensor_ops
from ctl.tensorflow_patches import eager_values


def address_of(tensor):
    return eager_values.values_of(tensor).__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint8, np.float16])
@pytest.mark.parametrize("count", [1, 100, 1 << 20])
def test_an_aligned_result_is_not_copied(dtype, count):
    array = memory.allocate_aligned(count, np.dtype(dtype))
    array[...] = 3
    (tensor,) = tensor_ops._to_tensors([array])
    assert address_of(tensor) == array.__array_interface__["data"][0]
    assert (tensor + tensor).numpy().tolist() == [6] * count


@pytest.mark.parametrize("num_arrays", [1, 8])
@pytest.mark.parametrize("offset", [4, 16, 60])
def test_an_unaligned_result_is_copied(num_arrays, offset):
    arrays = [memory.allocate_aligned(400, np.dtype(np.uint8)) for _ in range(num_arrays)]
    parts = [array[offset : offset + 256].view(np.float32) for array in arrays]
    for part in parts:
        part[...] = 3
    for part, tensor in zip(parts, tensor_ops._to_tensors(parts), strict=True):
        assert address_of(tensor) != part.__array_interface__["data"][0]
        assert (tensor + tensor).numpy().tolist() == [6] * 64


@pytest.mark.parametrize("num_arrays", [1, 8])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.bool_])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 5)])
def test_read_only_empty_and_other_arrays_have_the_values(num_arrays, dtype, shape):
    array = np.ones(shape, dtype)
    array.flags.writeable = False
    for tensor in tensor_ops._to_tensors([array] * num_arrays):
        assert tensor.shape == shape and tensor.dtype.as_numpy_dtype == dtype
        assert (tensor.numpy() == array).all()
