"""Runs every `case_*` of a program on this rank, one after the other, and prints what became of each."""

import json
import sys
import traceback

import ctl.hvd as hvd


def run_cases(names):
    """`names`: the globals of the program, in order of definition."""
    hvd.init()
    said = {}
    for name, case in list(names.items()):
        if name.startswith("case_"):
            try:
                case()
                said[name.removeprefix("case_")] = "ok"
            except BaseException:
                said[name.removeprefix("case_")] = traceback.format_exc()[-2000:]
            sys.stdout.flush()
    print(json.dumps(said))


def raised(kind, call, *parts):
    """Whether `call()` raises `kind` with all of `parts` in its text; returns the text."""
    try:
        call()
    except kind as e:
        text = str(e)
        for part in parts:
            assert part in text, f"{part!r} is not in {text!r}"
        return text
    raise AssertionError(f"expected {kind.__name__}")
