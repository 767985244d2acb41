"""What there is for collectives to work with: the table of --check-build. TensorFlow is not imported."""

import importlib.metadata
import importlib.util

from ctl.version import __version__

_FRAMEWORKS = (
    ("TensorFlow", ("tensorflow", "tensorflow-cpu", "tf-nightly")),
    ("Keras", ("keras",)),
    ("tf_keras", ("tf-keras", "tf_keras")),
    ("PyTorch", ()),
    ("MXNet", ()),
)


def version_of(names: tuple[str, ...]) -> str:
    """Of the first package of these that is installed; "" without any."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def table() -> str:
    """The table, in horovodrun's layout."""
    lines = [f"ctl v{__version__}:", "", "Available Frameworks:"]
    for name, packages in _FRAMEWORKS:
        version = version_of(packages)
        lines.append(f"    [{'X' if version else ' '}] {f'{name} {version}'.rstrip()}")
    lines += ["", "Available Controllers:", "    [ ] MPI", "    [X] TCP (what --gloo asks for)"]
    lines += ["", "Available Tensor Operations:", "    [X] TCP (ring, between processes)"]
    lines += [f"    [ ] {name}" for name in ("NCCL", "DDL", "CCL", "MPI", "Gloo")]
    return "\n".join(lines)
