"""Builds the site of docs/: guides, an API reference generated from docstrings, and the example models.

    make docs                                   # writes build/site; open build/site/index.html
    python docs/build_site.py --serve           # serves the site on http://127.0.0.1:8000

Copies the pages to build/pages, replaces links to files of the repository by links to pages, and runs
mkdocs in strict mode. These are errors (exit code 1): a broken link, a public name without a docstring, a
page outside of the navigation.
"""

import argparse
import ast
import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from site_reference import public_names, reference_pages, undocumented

ROOT = Path(__file__).parents[1]
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
PAGE_SUFFIXES = (".md", ".svg", ".png", ".gif", ".css")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".json": "json"}
NOT_LISTED = "messages.md"  # for proofreading
NAVIGATION = {  # group -> section -> pages; the section "" has no title
    "Guide": {
        "": [
            "first_model", "porting", "the_loop", "data", "sources", "correctness", "callbacks", "metrics",
            "checkpoints",
        ],
        "Keras models": ["keras"],
        "Several devices and machines": [
            "strategies", "launch", "several_machines", "reliability", "elastic",
        ],
        "Horovod scripts": ["horovod", "horovod_launcher"],
    },
    "How-to": {
        "": [
            "recipes", "testing", "libraries", "mistakes", "saving", "parameter_servers", "evaluator",
            "security",
        ],
        "Example models": ["models", "gallery", "flowers"],
        "Platforms": [
            f"deploy/{name}" for name in ("environment", "docker", "vertex", "kubernetes", "slurm")
        ],
    },
    "Reference": {"": ["flags", "glossary"]},
    "Internals": {"": ["architecture", "performance", "tensorflow_patches"]},
}  # fmt: skip
CONFIG = """site_name: ctl
site_description: Custom training loops for TensorFlow 2
docs_dir: pages
site_dir: site
strict: true
use_directory_urls: false
copyright: ctl {version}, Apache License 2.0
theme:
  name: material
  font: false
  logo: images/logo_header.svg
  favicon: images/logo.svg
  features:
    - navigation.tabs
    - navigation.top
    - navigation.footer
    - content.code.copy
    - search.highlight
    - toc.follow
  palette:
    - media: "(prefers-color-scheme: light)"
      scheme: default
      primary: deep orange
      toggle: {icon: material/weather-night, name: dark}
    - media: "(prefers-color-scheme: dark)"
      scheme: slate
      primary: deep orange
      toggle: {icon: material/weather-sunny, name: light}
extra_css: [images/site.css]
markdown_extensions:
  - admonition
  - attr_list
  - md_in_html
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
            line_length: 100
            docstring_section_style: list
            show_signature_annotations: false
            docstring_options: {warnings: false}
validation:
  omitted_files: warn
  links: {not_found: warn, anchors: warn, unrecognized_links: warn}
not_in_nav: |
  {not_listed}
{repository}nav:
"""


def main() -> int:
    """Builds or serves the site. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="serve the site instead of writing it")
    options = parser.parse_args()
    shutil.rmtree(PAGES, ignore_errors=True)
    if missing := undocumented(public_names()):
        print(f"public names without a docstring: {', '.join(missing)}", file=sys.stderr)
        return 1
    write_pages()
    write_reference()
    config = ROOT / "build" / "mkdocs.yml"
    config.write_text(configuration() + navigation())
    subcommand = ["serve"] if options.serve else ["build", "--clean"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", *subcommand, "--strict", "--config-file", str(config)]
    return subprocess.run(command, check=False, env=environ).returncode


def configuration() -> str:
    """Returns the configuration of mkdocs without the navigation."""
    project = (ROOT / "pyproject.toml").read_text()
    values = {
        "examples": str(ROOT / "docs" / "site_examples.py"),
        "version": re.findall(r'^version = "(.+)"$', project, re.MULTILINE)[0],
        "not_listed": NOT_LISTED,
        "repository": repository(project),
    }
    text = CONFIG
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def repository(project: str) -> str:
    """Returns the setting `repo_url` from pyproject.toml, else from the remote "origin" of git."""
    url = next(iter(re.findall(r'^Repository = "(.+)"$', project, re.MULTILINE)), "")
    if not url:
        command = ["git", "remote", "get-url", "origin"]
        url = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()
        url = re.sub(r"^git@([^:/]+):", r"https://\1/", url).removesuffix(".git")
    return f"repo_url: {url}\n" if url.startswith("https://") else ""


def write_pages() -> None:
    """Copies the guides and pictures. Each linked file of the repository gets a page."""
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.suffix in PAGE_SUFFIXES:
            copy_page(path, path.relative_to(ROOT / "docs"))


def copy_page(source: Path, target: Path) -> None:
    """Copies a picture, or a page with replaced links, to `target` in PAGES."""
    page = PAGES / target
    page.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix != ".md":
        shutil.copyfile(source, page)
        return
    parts = FENCED.split(source.read_text().replace("```python no-run", "```python"))
    page.write_text("".join(p if p.startswith("```") else replace_links(p, source, page) for p in parts))


def replace_links(text: str, source: Path, page: Path) -> str:
    """Returns Markdown in which links to files outside of docs/ are replaced by links to their pages."""

    def replacement(match: re.Match) -> str:
        prefix, name, anchor = match[1], match[2], match[3] or ""
        if "://" in name or name.startswith("mailto:"):
            return match[0]
        path = (source.parent / name).resolve()
        is_page = path.suffix in PAGE_SUFFIXES and (ROOT / "docs") in path.parents
        if not path.exists() or (is_page and (ROOT / "docs") in source.parents):
            return match[0]  # mkdocs reports broken links
        return f"{prefix}{page_of(path, page)}{anchor})"

    return LINK.sub(replacement, text)


def page_of(path: Path, linking_page: Path) -> str:
    """Returns the link from a page to the page of a file. Creates the page if necessary."""
    if (ROOT / "docs") in path.parents and path.suffix in PAGE_SUFFIXES:
        page = PAGES / path.relative_to(ROOT / "docs")
    else:
        name = f"{path.relative_to(ROOT)}.md".replace(".md.md", ".md")
        page = PAGES / (name.removeprefix("docs/") if name.endswith(".ipynb.md") else f"source/{name}")
        if not page.is_file():
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text("")  # the file may link to itself
            write_source(path, page)
    return os.path.relpath(page, linking_page.parent)


def write_source(path: Path, page: Path) -> None:
    """Writes a page with the content of a file, or the files of a folder."""
    if path.is_dir():
        files = [file for file in sorted(path.glob("*.py")) if file.name != "__init__.py"]
        links = "\n".join(f"- [{title_of(file)}]({page_of(file, page)})" for file in files)
        page.write_text(f"# {path.relative_to(ROOT)}\n\n{links}\n")
    elif path.suffix == ".md":
        copy_page(path, page.relative_to(PAGES))
    elif path.suffix == ".ipynb":
        page.write_text(replace_links(notebook(path, page), path, page))
    else:
        language = LANGUAGES.get(path.suffix, "text")
        page.write_text(f"# {path.relative_to(ROOT)}\n\n````{language}\n{path.read_text()}````\n")


def title_of(path: Path) -> str:
    """Returns the first line of the docstring of a Python file, after its name."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return f"{path.stem}: {docstring.splitlines()[0]}" if docstring else path.stem


def notebook(path: Path, page: Path) -> str:
    """Returns the cells of a notebook with their outputs. Pictures are written next to the page."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = page.with_name(f"{path.stem}_{len(parts)}.png")
                picture.write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![output of the cell]({picture.name})")
            else:
                text = "".join(output.get("text") or data.get("text/plain", ()))
                parts.append(f"```text\n{text.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def write_reference() -> None:
    """Writes the pages of the API reference."""
    (PAGES / "reference").mkdir(parents=True, exist_ok=True)
    for name, text in reference_pages().items():
        (PAGES / "reference" / f"{name}.md").write_text(text)


def navigation() -> str:
    """Returns the setting `nav` with all pages of PAGES, except NOT_LISTED."""
    decisions = sorted((PAGES / "decisions").glob("0*.md"))
    sources = sorted((PAGES / "source").rglob("*.md"))
    notebooks = [p.name for p in sorted(PAGES.glob("*.ipynb.md"))]
    generated = {
        "Guide": {"Notebook": notebooks},
        "Reference": {"Python API": [f"reference/{name}.md" for name in reference_pages()]},
        "Internals": {
            "Decisions": ["decisions/index.md", *(f"decisions/{p.name}" for p in decisions)],
            "Source": [str(p.relative_to(PAGES)) for p in sources],
        },
    }
    lines = ["  - Home: index.md"]
    for group, sections in NAVIGATION.items():
        lines.append(f"  - {group}:")
        listed = {section: [f"{page}.md" for page in pages] for section, pages in sections.items()}
        for section, pages in {**listed, **generated.get(group, {})}.items():
            lines += [f"    - {section}:"] if section else []
            lines += [f"{'      ' if section else '    '}- {page}" for page in pages]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
