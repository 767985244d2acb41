"""Builds the site of docs/: the guides, an API reference made from docstrings, and the example models.

    make docs                                   # into build/site; open build/site/index.html
    python docs/build_site.py --serve           # the same, on http://127.0.0.1:8000

Copies the pages to build/pages, where links to files of the repository become links to pages, and calls
mkdocs, strictly: a link or heading that is not there, a public name without a docstring, and a page that no
index lists end with 1.
"""

import argparse
import ast
import base64
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
PAGE_SUFFIXES = (".md", ".svg", ".png", ".gif")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".json": "json"}
GUIDES = {
    "Start": ["first_model", "models", "gallery", "keras", "flowers", "recipes", "testing", "mistakes"],
    "Training": [
        "the_loop", "correctness", "data", "callbacks", "metrics", "checkpoints", "saving", "flags",
    ],
    "Many devices": [
        "strategies", "launch", "several_machines", "parameter_servers", "evaluator", "reliability",
        "security", "performance",
    ],
    "Horovod": ["horovod", "horovod_launcher"],
    "Platforms": [f"deploy/{name}" for name in ("environment", "docker", "vertex", "kubernetes", "slurm")],
    "Project": ["architecture", "tensorflow_patches", "glossary"],
}  # fmt: skip
CONFIG = """site_name: ctl
site_description: Custom training loops for TensorFlow 2
docs_dir: pages
site_dir: site
strict: true
use_directory_urls: false
theme:
  name: material
  font: false
  features: [navigation.tabs, navigation.top, content.code.copy, search.highlight, toc.follow]
  palette:
    - media: "(prefers-color-scheme: light)"
      scheme: default
      primary: deep orange
      toggle: {icon: material/weather-night, name: dark}
    - media: "(prefers-color-scheme: dark)"
      scheme: slate
      primary: deep orange
      toggle: {icon: material/weather-sunny, name: light}
markdown_extensions:
  - admonition
  - pymdownx.highlight
  - pymdownx.superfences
  - toc: {permalink: true}
plugins:
  - search
  - mkdocstrings:
      handlers:
        python:
          options:
            extensions: ["{examples}:Examples"]
            docstring_style: google
            show_root_heading: true
            show_source: false
            members_order: source
            filters: ["!^_"]
            separate_signature: true
            show_signature_annotations: false
            docstring_options: {warnings: false}
validation:
  omitted_files: warn
  links: {not_found: warn, anchors: warn, unrecognized_links: warn}
nav:
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="serve the site instead of writing it")
    options = parser.parse_args()
    shutil.rmtree(PAGES, ignore_errors=True)
    names = public_names()
    missing = undocumented(names)
    if missing:
        print(f"public names without a docstring: {', '.join(missing)}", file=sys.stderr)
        return 1
    write_pages()
    write_reference(names)
    config = ROOT / "build" / "mkdocs.yml"
    examples = ROOT / "docs" / "site_examples.py"
    config.write_text(CONFIG.replace("{examples}", str(examples)) + navigation(names))
    words = ["serve"] if options.serve else ["build", "--clean"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", *words, "--strict", "--config-file", str(config)]
    return subprocess.run(command, check=False, env=environ).returncode


def public_names() -> dict[str, str]:
    """Each public name of `ctl` and the module that defines it, without importing TensorFlow."""
    sys.path.insert(0, str(ROOT))
    found = importlib.import_module("ctl")._NAMES
    return {name: found[name] for name in sorted(found)}


def undocumented(names: dict[str, str]) -> list[str]:
    """Public names, and their public methods, without a docstring; one of another class's method counts."""
    known = {name: found for name, module in names.items() if (found := definition(module, name))}
    classes = {name: found for name, found in known.items() if isinstance(found, ast.ClassDef)}
    said = {m.name for found in classes.values() for m in methods(found) if ast.get_docstring(m)}
    missing = [name for name, found in known.items() if not ast.get_docstring(found)]
    for name, found in classes.items():
        missing += [f"{name}.{m.name}" for m in methods(found) if m.name not in said]
    return missing


def definition(module: str, name: str) -> Any:
    """The class or function of a module; None for a constant."""
    tree = ast.parse(source_of(module).read_text())
    return next((node for node in tree.body if getattr(node, "name", "") == name), None)


def methods(found: ast.ClassDef) -> list[ast.FunctionDef]:
    return [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]


def source_of(module: str) -> Path:
    """The file of a module."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def write_pages() -> None:
    """Copies the guides and pictures; links to other files of the repository get a page each."""
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.suffix in PAGE_SUFFIXES:
            copied(path, path.relative_to(ROOT / "docs"))


def copied(source: Path, target: Path) -> None:
    """A page with its links changed, or a picture."""
    to = PAGES / target
    to.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix != ".md":
        shutil.copyfile(source, to)
        return
    parts = FENCED.split(source.read_text())
    to.write_text("".join(p if p.startswith("```") else linked(p, source, to) for p in parts))


def linked(text: str, source: Path, to: Path) -> str:
    """Markdown whose links to files outside of docs/ lead to pages made of them."""

    def changed(found: re.Match) -> str:
        before, name, anchor = found[1], found[2], found[3] or ""
        if "://" in name or name.startswith("mailto:"):
            return found[0]
        path = (source.parent / name).resolve()
        is_page = path.suffix in PAGE_SUFFIXES and (ROOT / "docs") in path.parents
        if not path.exists() or (is_page and (ROOT / "docs") in source.parents):
            return found[0]  # mkdocs says what is wrong with it
        return f"{before}{page_of(path, to)}{anchor})"

    return LINK.sub(changed, text)


def page_of(path: Path, to: Path) -> str:
    """The link from page `to` to the page of a file, which is made if there is none yet."""
    if (ROOT / "docs") in path.parents and path.suffix in PAGE_SUFFIXES:
        page = PAGES / path.relative_to(ROOT / "docs")
    else:
        name = f"{path.relative_to(ROOT)}.md".replace(".md.md", ".md")
        page = PAGES / (name.removeprefix("docs/") if name.endswith(".ipynb.md") else f"source/{name}")
        if not page.is_file():
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text("")  # links may come back to it
            write_source(path, page)
    return os.path.relpath(page, to.parent)


def write_source(path: Path, page: Path) -> None:
    """A page that shows a file, or lists a folder."""
    if path.is_dir():
        files = [file for file in sorted(path.glob("*.py")) if file.name != "__init__.py"]
        listed = "\n".join(f"- [{file.name}]({page_of(file, page)})" for file in files)
        page.write_text(f"# {path.relative_to(ROOT)}\n\n{listed}\n")
    elif path.suffix == ".md":
        copied(path, page.relative_to(PAGES))
    elif path.suffix == ".ipynb":
        page.write_text(linked(notebook(path, page), path, page))
    else:
        language = LANGUAGES.get(path.suffix, "text")
        page.write_text(f"# {path.relative_to(ROOT)}\n\n````{language}\n{path.read_text()}````\n")


def notebook(path: Path, page: Path) -> str:
    """The cells of a notebook, and what they show; pictures go beside the page."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = page.with_name(f"{path.stem}_{len(parts)}.png")
                picture.write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![what the cell shows]({picture.name})")
            else:
                text = "".join(output.get("text") or data.get("text/plain", ()))
                parts.append(f"```text\n{text.strip()}\n```")
    return "\n\n".join(parts) + "\n"


# the base class of the trainer has the methods that users write
WITH_BASES = {"Trainer": "    options:\n      inherited_members: true\n"}


def write_reference(names: dict[str, str]) -> None:
    """A page per part of the package, with its public names."""
    for part, members in parts_of(names).items():
        entries = [f"::: {names[n]}.{n}\n{WITH_BASES.get(n, '')}" for n in members]
        text = f"# ctl: {part}\n\n" + "\n".join(entries)
        (PAGES / "reference").mkdir(parents=True, exist_ok=True)
        (PAGES / "reference" / f"{part}.md").write_text(text)


def parts_of(names: dict[str, str]) -> dict[str, list[str]]:
    """Folder of ctl, or file of its root -> public names."""
    parts: dict[str, list[str]] = {}
    for name, module in names.items():
        parts.setdefault(module.split(".")[1], []).append(name)
    return dict(sorted(parts.items(), key=lambda part: (part[0] != "trainer", part[0])))


def navigation(names: dict[str, str]) -> str:
    """The part `nav` of the configuration; every page of PAGES is in it."""
    lines = ["  - Home: index.md"]
    for title, guides in GUIDES.items():
        lines += [f"  - {title}:", *(f"    - {guide}.md" for guide in guides)]
    lines += ["  - Reference:", *(f"    - reference/{part}.md" for part in parts_of(names))]
    decisions = sorted((PAGES / "decisions").glob("0*.md"))
    lines += ["  - Decisions:", "    - decisions/index.md"]
    lines += [f"    - decisions/{p.name}" for p in decisions]
    lines += ["  - Notebooks:", *(f"    - {p.name}" for p in sorted(PAGES.glob("*.ipynb.md")))]
    sources = sorted((PAGES / "source").rglob("*.md"))
    lines += ["  - Source:", *(f"    - {p.relative_to(PAGES)}" for p in sources)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
