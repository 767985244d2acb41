"""Build properties of the runtime. Scripts query them before they use a feature."""


def mpi_built() -> bool:
    """Returns False, because MPI is not used."""
    return False


def mpi_enabled() -> bool:
    """Returns False, because MPI is not used."""
    return False


def mpi_threads_supported() -> bool:
    """Returns False, because MPI is not used."""
    return False


def gloo_built() -> bool:
    """Returns True, because collectives run over TCP without MPI."""
    return True


def gloo_enabled() -> bool:
    """Returns True, as `gloo_built`."""
    return True


def nccl_built() -> int:
    """Returns 1 if NCCL is used (TensorFlow has a GPU and CTL_COLLECTIVES is not "tcp"), otherwise 0."""
    from ctl.collectives import tensorflow_plane
    from ctl.collectives.settings import read_settings

    return int(cuda_built() and read_settings().plane != "tcp" and tensorflow_plane.has_gpus())


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
