"""Sequential execution of every `case_*` of a program on this rank, with its outcomes as JSON."""

import json
import sys
import traceback

import ctl.hvd as hvd


def run_cases(names):
    """Runs the cases in `names`, the globals of the program in order of definition."""
    hvd.init()
    outcome_by_case = {}
    for name, case in list(names.items()):
        if name.startswith("case_"):
            try:
                case()
                outcome_by_case[name.removeprefix("case_")] = "ok"
            except BaseException:
                outcome_by_case[name.removeprefix("case_")] = traceback.format_exc()[-2000:]
            sys.stdout.flush()
    print(json.dumps(outcome_by_case))


def raised(error_type, call, *parts):
    """Checks that `call()` raises `error_type` with all of `parts` in its message. Returns the message."""
    try:
        call()
    except error_type as e:
        text = str(e)
        for part in parts:
            assert part in text, f"{part!r} is not in {text!r}"
        return text
    raise AssertionError(f"expected {error_type.__name__}")
