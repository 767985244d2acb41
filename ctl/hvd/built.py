"""What the runtime is made of; scripts ask before they use it."""


def mpi_built() -> bool:
    """False: there is no MPI."""
    return False


def mpi_enabled() -> bool:
    """False: there is no MPI."""
    return False


def mpi_threads_supported() -> bool:
    """False: there is no MPI."""
    return False


def gloo_built() -> bool:
    """True: collectives go over TCP without MPI, which is what scripts ask this for."""
    return True


def gloo_enabled() -> bool:
    """True, as `gloo_built`."""
    return True


def nccl_built() -> int:
    """1 where tensors go by NCCL: TensorFlow sees a GPU, and CTL_COLLECTIVES is not "tcp"; else 0."""
    from ctl.collectives import tensorflow_plane
    from ctl.collectives.settings import read_settings

    return int(cuda_built() and read_settings().plane != "tcp" and tensorflow_plane.has_gpus())


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """Whether this TensorFlow was built for CUDA."""
    import tensorflow as tf

    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Whether this TensorFlow was built for ROCm."""
    import tensorflow as tf

    return bool(tf.test.is_built_with_rocm())


def sycl_built() -> bool:
    """False."""
    return False
