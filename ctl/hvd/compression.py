"""Smaller floats on the way: `Compression.none`, `.fp16`, `.bf16`."""

from typing import Any

import tensorflow as tf
from ctl.hvd import process_sets


class Compressor:
    """What goes around a reduction; subclass it for a compression of your own."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """(what is sent, what `decompress` needs)."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """What was received, as it was before."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


def _to(dtype: tf.DType) -> type[Compressor]:
    class FloatCompressor(Compressor):
        """Floats are sent and added up as a smaller type; other tensors are left as they are."""

        @staticmethod
        def compress(tensor: Any) -> Any:
            if tensor.dtype.is_floating and tensor.dtype.size > dtype.size:
                return tf.cast(tensor, dtype), tensor.dtype
            return tensor, None

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return tensor if ctx is None else tf.cast(tensor, ctx)

    return FloatCompressor


FP16Compressor = _to(tf.float16)
BF16Compressor = _to(tf.bfloat16)


class Compression:
    """The compressions there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def effective_compression(compression: Any) -> Any:
    """A compression, or none instead of our own where no tensor goes through a network.

    Between ranks that share memory, converting costs more than it saves, and rounds.
    """
    is_own = compression in (FP16Compressor, BF16Compressor)
    return NoneCompressor if is_own and process_sets.all_share_memory() else compression
