"""Fingerprint of a process, which must be equal on all workers: versions, code, devices, flags.

fingerprint_of_process(num_gpus=0, flags={"learning_rate": 0.1})
-> {"tensorflow": "2.21.0", "code of models.mnist": "a1b2…", "GPUs": 0, "--learning_rate": 0.1, …}
"""

import hashlib
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ctl.tensorflow_patches import switches
from ctl.version import __version__

CODE = "code of "
_SECRET = re.compile(
    r"password|passwd|passphrase|secret|token|credential|apikey|connection_string"
    r"|(^|_)(pass|pwd|auth|bearer|key)$|(api|access|private|secret|encryption|account|ssh)_?keys?$"
)
_SECRET_VARIABLES = re.compile("_keys$")  # in addition to `_SECRET`
_HARMLESS = re.compile(  # counts and types of tokens, parts of data and layers, paths of secrets
    r"tokens$|tokeniz(er|ers|ation)|(^|_)tokens_\w|_(file|path|dir|name|id)$"
    r"|(^|_)token_(length|len|dim|dims|size|count|types?|ids?|index|indices|embeddings?|vocab|level|rate"
    r"|dropout|drop|mask|masking|budget|limit|merging|mixing|mixer|pooling|prob|shift|weights?|column)(_|$)"
    r"|(mask|pad|eos|bos|unk|sep|cls|start|end|first|last|special)_token$"
    r"|(forward|backward|single|one|two|multi|first|second|last|num|n|max|per|low|high|band)_pass$"
    r"|(use|no|require|enable|with)_auth$"
)
_KEYS_OF_DATA = re.compile(  # flags that name a part of an example or of a record
    r"(^|_)(images?|labels?|features?|targets?|inputs?|outputs?|query|text|audio|video|mask|example|sample"
    r"|batch|data|dataset|metric|monitor|loss|score|weights?|x|y|primary|foreign|sort|order|group|partition"
    r"|row|column|cache|join|index|time|dict|map|class|signature|value|id)_key$"
)
_PACKAGES = ("tensorflow", "keras", "tf_keras", "numpy")


def fingerprint_of_process(num_gpus: int, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns name -> value for this process."""
    versions = {"ctl": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        if name in sys.modules:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    if disabled := switches.disabled_patches():
        versions[switches.VARIABLE] = ",".join(sorted(disabled))
    code = {f"{CODE}{name}": digest for name, digest in _own_code().items()}
    return {**versions, **code, "GPUs": num_gpus, **{f"--{k}": v for k, v in flags.items()}}


def shown(name: str, value: Any) -> Any:
    """Returns a value that may be sent and printed. A secret is replaced by a note with its digest."""
    if not looks_secret(name):
        return value
    return f"(hidden, digest {hashlib.sha256(str(value).encode()).hexdigest()[:8]})"


def looks_secret(name: str, *, of_variable: bool = False) -> bool:
    """Returns True if a flag or a variable of this name holds a secret.

    True for `api_key`, `hf-token` and `db.pass`, but not for `max_tokens`, `image_key` or `password_file`.
    True for every environment variable with the suffix `_KEY`.
    """
    normalized = re.sub(r"[.-]", "_", name).lower()
    if _HARMLESS.search(normalized):
        return False
    if of_variable:
        return bool(_SECRET.search(normalized) or _SECRET_VARIABLES.search(normalized))
    return bool(_SECRET.search(normalized)) and not _KEYS_OF_DATA.search(normalized)


def _own_code() -> dict[str, str]:
    """Returns module -> digest of its file, for imported modules outside of installed packages."""
    paths = sysconfig.get_paths()
    library_dirs = {paths[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")}
    library_dirs |= set(map(os.path.realpath, library_dirs))
    installed = tuple(f"{directory}{os.sep}" for directory in library_dirs)
    digest_by_module = {}
    for name, module in sys.modules.copy().items():  # another thread may import
        file = str(getattr(module, "__file__", None) or "")
        if not file.endswith(".py") or name.startswith("ctl.") or file.startswith(installed):
            continue  # this condition skips all but a few of thousands of modules
        path = Path(file).resolve()
        if str(path).startswith(installed):
            continue
        try:
            digest_by_module[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        except OSError:
            continue
    return digest_by_module
