"""A clock and a terminal for tests of the console."""

import io
import re

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    def __init__(self):
        self.now, self.calls = 1000.0, 0

    def __call__(self):
        self.calls += 1
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"
    writes = 0

    def isatty(self):
        return True

    def write(self, text):
        self.writes += 1
        return super().write(text)
