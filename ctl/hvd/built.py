"""Build properties of the runtime. Scripts query them before they use a feature."""

import importlib.util

from ctl.collectives.settings import read_settings
from ctl.collectives.transports import mpi


def mpi_built() -> bool:
    """Returns True if mpi4py is installed, with which collectives can run over MPI."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Returns True if collectives run over MPI: in a job of `ctlrun --mpi`, or with CTL_COLLECTIVES=mpi."""
    return read_settings().transport == "mpi"


def mpi_threads_supported() -> bool:
    """Returns True if `init()` has initialized MPI with MPI_THREAD_MULTIPLE."""
    return mpi.are_threads_supported()


def gloo_built() -> bool:
    """Returns True, because collectives can run over TCP."""
    return True


def gloo_enabled() -> bool:
    """Returns True unless collectives run over MPI."""
    return not mpi_enabled()


def nccl_built() -> int:
    """Returns 1 if NCCL is used (TensorFlow has a GPU and CTL_COLLECTIVES allows it), otherwise 0."""
    from ctl.collectives import tensorflow_plane

    return int(cuda_built() and read_settings().plane not in ("tcp", "mpi") and tensorflow_plane.has_gpus())


def ddl_built() -> bool:
    """Returns False."""
    return False


def ccl_built() -> bool:
    """Returns False."""
    return False


def cuda_built() -> bool:
    """Returns True if this TensorFlow was built for CUDA."""
    import tensorflow as tf

    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Returns True if this TensorFlow was built for ROCm."""
    import tensorflow as tf

    return bool(tf.test.is_built_with_rocm())


def sycl_built() -> bool:
    """Returns False."""
    return False
