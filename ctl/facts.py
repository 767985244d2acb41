"""What the workers of one job must have in common: versions, code, devices, flags.

    facts.here(num_gpus=0, flags={"learning_rate": 0.1})
    -> {"tensorflow": "2.21.0", "code of models.mnist": "a1b2…", "GPUs": 0, "--learning_rate": 0.1, …}
"""

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ctl.version import __version__

CODE = "code of "
_SECRET = ("password", "passwd", "secret", "token", "credential", "api_key", "apikey", "private_key")
_PACKAGES = ("tensorflow", "keras", "tf_keras", "numpy")


def here(num_gpus: int, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value for this process."""
    versions = {"ctl": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        if name in sys.modules:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    code = {f"{CODE}{name}": digest for name, digest in _own_code().items()}
    return {**versions, **code, "GPUs": num_gpus, **{f"--{k}": v for k, v in flags.items()}}


def shown(name: str, value: Any) -> Any:
    """A value as it may travel and be printed; of a secret only that it is one, and its digest."""
    if not looks_secret(name):
        return value
    return f"(hidden, digest {hashlib.sha256(str(value).encode()).hexdigest()[:8]})"


def looks_secret(name: str) -> bool:
    """Whether a flag of this name holds what nobody else may read."""
    return any(word in name.lower() for word in _SECRET)


def _own_code() -> dict[str, str]:
    """Module -> digest of its file, for the imported modules that nobody has installed."""
    paths = sysconfig.get_paths()
    installed = [Path(paths[k]).resolve() for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not str(file).endswith(".py") or name.startswith("ctl."):
            continue
        path = Path(file).resolve()
        if any(path.is_relative_to(place) for place in installed):
            continue
        try:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        except OSError:
            continue
    return found
