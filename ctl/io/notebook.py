"""Detection of notebooks: Jupyter, Colab, Kaggle, VS Code."""

import sys
from typing import Any


def shell() -> Any:
    """Returns IPython's shell in a notebook kernel, otherwise None. Does not import IPython."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    ipython = get_ipython() if callable(get_ipython) else None
    class_names = [c.__name__ for c in type(ipython).__mro__]
    return ipython if "ZMQInteractiveShell" in class_names else None
