"""Is this process the kernel of a notebook: Jupyter, Colab, Kaggle, VS Code."""

import sys
from typing import Any


def shell() -> Any:
    """IPython's shell in a kernel, None elsewhere; IPython is not imported for it."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    found = get_ipython() if callable(get_ipython) else None
    kinds = [c.__name__ for c in type(found).__mro__]
    return found if "ZMQInteractiveShell" in kinds else None
