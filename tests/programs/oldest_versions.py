"""Constraints for pip: the oldest versions of the libraries that pyproject.toml allows.

    python tests/programs/oldest_versions.py > constraints.txt

`numpy>=1.26` becomes `numpy==1.26.*`: the newest patch of the oldest version. Tools of the tests, such as
pytest and mypy, are not limited.
"""

import re
from pathlib import Path

LISTS = ("dependencies", "deploy")
LIBRARIES_OF_TESTS = ("tf_keras",)
_REQUIREMENT = re.compile(r'"(?P<name>[A-Za-z0-9_.-]+)>=(?P<version>[0-9.]+)')


def constraints(pyproject: str) -> list[str]:
    """Returns a constraint for each library with an oldest version in the text of pyproject.toml."""
    lists = dict(re.findall(r"^(\w+) = \[(.*?)\]$", pyproject, re.MULTILINE | re.DOTALL))
    matches = [match for name in LISTS for match in _REQUIREMENT.finditer(lists[name])]
    matches += [m for m in _REQUIREMENT.finditer(lists["test"]) if m["name"] in LIBRARIES_OF_TESTS]
    return [f"{match['name']}=={match['version']}.*" for match in matches]


if __name__ == "__main__":
    print("\n".join(constraints((Path(__file__).parents[2] / "pyproject.toml").read_text())))
