"""Compression of floating-point tensors for transfers: `Compression.none`, `.fp16`, `.bf16`."""

from typing import Any

import tensorflow as tf
from ctl.errors import UsageError
from ctl.hvd import process_sets


class Compressor:
    """Conversion of tensors before and after a reduction. Base class of custom compressions."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor to send and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the received tensor in its original type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """A compressor that does not change tensors."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        """Returns the tensor unchanged, and None."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor unchanged."""
        return tensor


def _create_float_compressor(dtype: tf.DType) -> type[Compressor]:
    class FloatCompressor(Compressor):
        """A compressor that sends and sums floats in a smaller type. Other tensors are unchanged."""

        @staticmethod
        def compress(tensor: Any) -> Any:
            if tensor.dtype.is_floating and tensor.dtype.size > dtype.size:
                return tf.cast(tensor, dtype), tensor.dtype
            return tensor, None

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return tensor if ctx is None else tf.cast(tensor, ctx)

    return FloatCompressor


FP16Compressor = _create_float_compressor(tf.float16)
BF16Compressor = _create_float_compressor(tf.bfloat16)


class Compression:
    """The available compressions."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def check_compression(compression: Any) -> None:
    """Raises UsageError for a value without the methods of `Compressor`."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise UsageError(
            f"compression is {compression!r:.80}; expected hvd.Compression.none, .fp16 or .bf16, or a "
            "class with compress and decompress."
        )


def effective_compression(compression: Any) -> Any:
    """Returns the compression, or `Compression.none` instead of fp16 or bf16 if all ranks share memory.

    Within one machine the conversion takes more time than it saves, and it rounds.
    """
    check_compression(compression)
    is_builtin = compression in (FP16Compressor, BF16Compressor)
    return NoneCompressor if is_builtin and process_sets.all_share_memory() else compression
