"""Reads the line of `ctlrun`: options, then the command, whose own options are not looked at.

asked, command = read(["-np", "2", "python", "train.py", "--verbose"])
asked["num_proc"], asked["verbose"]      -> 2, None
"""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ctl.errors import UsageError
from ctl.io.console import quoted
from ctl.launch.horovodrun.flags import FLAGS, GROUPS, Flag

EXAMPLE = "ctlrun -np 2 -H localhost:2 python train.py"
SEE = "see `ctlrun --help`"
Asked = Mapping[str, Any]
_NOTHING = MappingProxyType(dict.fromkeys(flag.key for flag in FLAGS.values()))
_SHORT = tuple(name for name in FLAGS if len(name) == 2)  # as in -p2222
_TITLES = {
    "accepted": "accepted, nothing to do",
    "meaningless": "accepted; they change nothing here",
}


def nothing() -> dict[str, Any]:
    """What is asked by a line without options."""
    return dict(_NOTHING)


def read(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What was asked by key, None where nothing was, and the words of the command.

    Raises UsageError that names the word.
    """
    asked, words = nothing(), list(argv)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        flag, name, values = _found(word)
        if flag.takes is None and values:
            raise UsageError(f"{name} takes no value, but came with {quoted(values[0])}; {SEE}")
        while len(values) < flag.count:
            if not words:
                raise UsageError(f"{name} came last; expected {flag.metavar} after it, {SEE}")
            values.append(words.pop(0))
        put(asked, flag, name, values)
    return asked, words


def put(asked: dict[str, Any], flag: Flag, name: str, values: list) -> None:
    """Notes an option that came; UsageError for a value that it does not take."""
    if flag.takes is None:
        asked[flag.key] = flag.sets
        return
    try:
        converted = [flag.takes(value) for value in values]
    except ValueError as e:
        came = " ".join(map(str, values))
        raise UsageError(
            f"{name} came with {quoted(came)}; {e}, as in {name} {flag.metavar}"
        ) from None
    value = converted[0] if len(converted) == 1 else tuple(converted)
    before = asked[flag.key]
    asked[flag.key] = f"{before},{value}" if flag.adds and before else value


def meaningless(asked: Asked) -> list[str]:
    """The options that came and have no meaning here, by their first names."""
    firsts = {f.key: f.names.split()[0] for f in reversed(GROUPS["meaningless"])}
    return [name for key, name in firsts.items() if asked[key] is not None][::-1]


def helped() -> str:
    """The text of --help."""
    lines = ["usage: ctlrun [options] command [its options]", ""]
    lines += ["Runs a command once per rank, for scripts with `import ctl.hvd as hvd`.", ""]
    for title, group in GROUPS.items():
        lines.append(f"{_TITLES.get(title, title)}:")
        if title == "meaningless":
            lines += [f"  {flag.names}" for flag in group]
        for flag in group if title != "meaningless" else ():
            lines += [f"  {', '.join(flag.names.split())} {flag.metavar}".rstrip()]
            lines += [f"      {flag.about}"]
        lines.append("")
    return "\n".join([*lines, f"example:\n  {EXAMPLE}"])


def _found(word: str) -> tuple[Flag, str, list]:
    """The option that a word names, and the value in the same word, as in --num-proc=2 or -p2222."""
    name, equals, value = word.partition("=")
    if name in FLAGS:
        return FLAGS[name], name, [value] if equals else []
    short = next((s for s in _SHORT if word.startswith(s) and FLAGS[s].takes), None)
    if short and not word.startswith("--") and not _looks_long(word):
        return FLAGS[short], short, [word[2:]]
    near = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.5)
    cure = f"did you mean {near[0]}?" if near else "its name is not near any."
    raise UsageError(
        f"{quoted(word)} is no option of ctlrun; {cure} Options of the script come after it: {EXAMPLE}"
    )


def _looks_long(word: str) -> bool:
    """True for a mistyped -hostfil or -prefix-stamp, rather than -p with a value."""
    return not (word.startswith("-p") and word[2:].isdigit()) and not word.startswith(("-H", "-i"))
