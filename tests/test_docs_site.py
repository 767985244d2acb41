"""The site of docs/: every page is in its navigation, every public name has a docstring."""

import ast
import re
import subprocess
import sys

import ctl
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import build_site


@pytest.fixture
def pages(tmp_path, monkeypatch):
    monkeypatch.setattr(build_site, "PAGES", tmp_path)
    build_site.write_pages()
    build_site.write_reference(build_site.public_names())
    return tmp_path


def test_every_page_is_in_the_navigation(pages):
    found = set(re.findall(r"[\w/.-]+\.md", build_site.navigation(build_site.public_names())))
    assert found == {str(path.relative_to(pages)) for path in pages.rglob("*.md")}


def test_links_of_pages_lead_to_pages(pages):
    assert (pages / "source/models/mnist.py.md").read_text().startswith("# models/mnist.py\n\n````python")
    for page in pages.rglob("*.md"):
        for _, name, _ in build_site.LINK.findall(build_site.FENCED.sub("", page.read_text())):
            if "source" in page.parts and page.suffixes != [".md"]:
                continue  # a program, as it is
            assert "://" in name or (page.parent / name).exists(), f"{page.relative_to(pages)}: {name}"


def test_every_public_name_is_in_the_reference_and_has_a_docstring(pages):
    names = build_site.public_names()
    assert set(names) == set(ctl.__all__) - {"__version__"}
    text = "".join(path.read_text() for path in (pages / "reference").glob("*.md"))
    assert set(re.findall(r"^::: (\S+)$", text, re.MULTILINE)) == {f"{m}.{n}" for n, m in names.items()}
    assert build_site.undocumented(names) == []


def test_a_name_without_a_docstring_is_named(monkeypatch):
    tree = ast.parse("class Every:\n  'a'\n  def due(self): pass\n  def _own(self): pass\ndef run(): pass")
    found = {node.name: node for node in tree.body}
    monkeypatch.setattr(build_site, "definition", lambda module, name: found[name])
    assert build_site.undocumented(dict.fromkeys(found, "ctl")) == ["run", "Every.due"]


def test_the_site_is_built_without_a_warning():
    pytest.importorskip("mkdocs", reason="`make docs` installs mkdocs")
    command = [sys.executable, "docs/build_site.py"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Trainer" in (ROOT / "build/site/reference/trainer.html").read_text()


def test_brackets_beside_a_link_are_no_reference(pages):
    """Markdown takes `[1] [name](address)` for a reference to "name"."""
    for page in pages.rglob("*.md"):
        if "````" in page.read_text():
            continue  # a file as it is
        text = re.sub("`[^`]*`", "", build_site.FENCED.sub("", page.read_text()))
        assert not re.findall(r"\][ \n]?\[[^\]]+\]", text), page.relative_to(pages)
