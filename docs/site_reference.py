"""Pages of the API reference, with the names that users write: `ctl.Trainer`, `hvd.allreduce`."""

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# the base class of the trainer defines the methods that users write
OPTIONS = {"ctl.Trainer": {"inherited_members": "true"}}
PAGE_BY_PART = {  # part of ctl/ -> page
    "trainer": "trainer", "trainer_options": "trainer", "app": "trainer", "config": "trainer",
    "step": "trainer",
    "distribute": "distribution", "data": "data", "keras": "keras", "callbacks": "callbacks",
    "checkpoints": "checkpoints", "metrics": "metrics", "errors": "errors", "testing": "testing",
    "hvd": "hvd", "trackers": "metrics", "learning_rate_search": "trainer",
}  # fmt: skip
TITLES = {
    "trainer": "Trainer and settings", "data": "Data", "keras": "Compiled Keras models",
    "callbacks": "Callbacks and intervals", "checkpoints": "Checkpoints", "metrics": "Metric writers",
    "distribution": "Strategies and workers", "errors": "Errors", "testing": "Testing",
    "hvd": "ctl.hvd", "hvd_keras": "ctl.hvd.keras", "hvd_elastic": "ctl.hvd.elastic",
}  # fmt: skip
IMPORTS = {"hvd": "import ctl.hvd as hvd", "hvd_keras": "import ctl.hvd.keras as hvd"}
INTRODUCTIONS = {"hvd": "ctl.hvd.ops"}  # page -> module whose docstring applies to all of its functions


def public_names() -> dict[str, str]:
    """Returns public name as users write it -> path of its definition, without importing TensorFlow."""
    sys.path.insert(0, str(ROOT))
    names = importlib.import_module("ctl")._NAMES
    paths = {f"ctl.{name}": f"{module}.{name}" for name, module in names.items()}
    paths |= {f"ctl.testing.{name}": f"ctl.testing.{name}" for name in functions_of("ctl.testing")}
    for module in ("ctl.hvd", "ctl.hvd.keras", "ctl.hvd.elastic"):
        paths |= {f"{module}.{name}": path for name, path in exports_of(module).items()}
    return dict(sorted(paths.items()))


def functions_of(module: str) -> list[str]:
    """Returns the public functions and classes that a module defines."""
    return [n.name for n in tree_of(module).body if isinstance(n, DEFINITIONS) and n.name[0] != "_"]


def exports_of(module: str) -> dict[str, str]:
    """Returns name -> path of its definition, for the classes and functions in `__all__` of a module."""
    body = tree_of(module).body
    exports = next(n.value for n in body if isinstance(n, ast.Assign) and n.targets[0].id == "__all__")
    paths = {name: path_of_definition(module, name) for name in ast.literal_eval(exports)}
    return {name: path for name, path in paths.items() if definition(path) is not None}


def path_of_definition(module: str, name: str) -> str:
    """Returns `module.name` of the module that defines a name, or "" for a module."""
    for node in tree_of(module).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ctl."):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    is_module = ROOT.joinpath(*node.module.split("."), f"{alias.name}.py").is_file()
                    return "" if is_module else path_of_definition(node.module, alias.name)
    return f"{module}.{name}"


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def tree_of(module: str) -> ast.Module:
    """Returns the syntax tree of a module."""
    path = ROOT.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def definition(path: str) -> Any:
    """Returns the class or function at `module.name`, or None for other objects."""
    module, _, name = path.rpartition(".")
    body = tree_of(module).body if module else ()
    return next((n for n in body if isinstance(n, DEFINITIONS) and n.name == name), None)


def methods(class_definition: ast.ClassDef) -> list[ast.FunctionDef]:
    """Returns the public methods of a class."""
    return [n for n in class_definition.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]


def undocumented(names: dict[str, str]) -> list[str]:
    """Returns public names and public methods without a docstring.

    A method may have its docstring in another class, of which it is an override.
    """
    definitions = {name: node for name, path in names.items() if (node := definition(path))}
    classes = {name: node for name, node in definitions.items() if isinstance(node, ast.ClassDef)}
    documented = {m.name for node in classes.values() for m in methods(node) if ast.get_docstring(m)}
    missing = [name for name, node in definitions.items() if not ast.get_docstring(node)]
    for name, node in classes.items():
        missing += [f"{name}.{m.name}" for m in methods(node) if m.name not in documented]
    return missing


def page_of_name(name: str, path: str) -> str:
    """Returns the page of a public name."""
    for module in ("ctl.hvd.keras", "ctl.hvd.elastic"):
        if name.startswith(f"{module}."):
            return module.removeprefix("ctl.").replace(".", "_")
    return PAGE_BY_PART[name.split(".")[1] if name.count(".") > 1 else path.split(".")[1]]


def reference_pages() -> dict[str, str]:
    """Returns page -> text, in the order of the navigation."""
    names_by_page: dict[str, list[tuple[str, str]]] = {page: [] for page in TITLES}
    repeated: dict[str, list[str]] = {page: [] for page in TITLES}
    seen_paths: set[str] = set()
    for name, path in sorted(public_names().items(), key=lambda item: (item[0].count("."), item[0])):
        page = page_of_name(name, path)
        if path in seen_paths:
            repeated[page].append(f"`{name.rpartition('.')[2]}`")
        else:
            names_by_page[page].append((name, path))
        seen_paths.add(path)
    pages = {}
    for page, entries in names_by_page.items():
        first = {"ctl.Trainer": 0, "ctl.run": 1, "ctl.Config": 2}
        parts = [f"# {TITLES[page]}\n"]
        if page in IMPORTS:
            parts.append(f"```python\n{IMPORTS[page]}\n```\n")
        if page in INTRODUCTIONS:
            docstring = ast.get_docstring(tree_of(INTRODUCTIONS[page])) or ""
            parts.append(docstring.partition("\n\n")[2] + "\n")
        if repeated[page]:
            parts.append(f"The same as in [ctl.hvd](hvd.md): {', '.join(repeated[page])}.\n")
        for name, path in sorted(entries, key=lambda entry: (first.get(entry[0], 9), entry[0].lower())):
            settings = {"heading": name, "toc_label": name, **OPTIONS.get(name, {})}
            lines = [f"::: {path}", "    options:", *(f"      {k}: {v}" for k, v in settings.items())]
            parts.append("\n".join(lines) + "\n")
        pages[page] = "\n".join(parts)
    return pages
