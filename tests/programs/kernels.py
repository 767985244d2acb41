"""A simulated notebook kernel for `ctl.io.notebook`, with the displays of its cells."""

import sys
import types


def pretend_kernel(monkeypatch, shell="ZMQInteractiveShell"):
    """Makes this process appear as a kernel. Returns the displays, each a list of texts, newest last."""
    displays: list[list[str]] = []

    class Handle:
        def __init__(self, data):
            self.texts = [data["text/plain"]]
            displays.append(self.texts)

        def update(self, data, raw):
            assert raw
            self.texts.append(data["text/plain"])

    def display(data, raw, display_id):
        assert raw and display_id is True
        return Handle(data)

    kernel = type("Shell", (type(shell, (), {}),), {})()  # Colab's kernel has a subclass
    package = types.ModuleType("IPython")
    package.get_ipython = lambda: kernel
    package.display = types.ModuleType("IPython.display")
    package.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", package.display)
    return displays
