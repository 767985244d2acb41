"""Site of docs/: navigation, links and the reference of public names."""

import ast
import re
import subprocess
import sys
import types

import ctl
import ctl.hvd as hvd
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import build_site
import generate_messages
import site_reference


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_site, "PAGES", directory)
        build_site.write_pages()
        build_site.write_reference()
        yield directory


@pytest.fixture(scope="module")
def public_names():
    return build_site.public_names()


def test_every_page_is_in_the_navigation(pages):
    listed = re.findall(r"[\w/.-]+\.md", build_site.navigation())
    assert len(set(listed)) == len(listed)
    assert {*listed, build_site.NOT_LISTED} == {str(p.relative_to(pages)) for p in pages.rglob("*.md")}


def test_links_of_pages_lead_to_pages(pages):
    assert (pages / "source/models/mnist.py.md").read_text().startswith("# models/mnist.py\n\n````python")
    for page in pages.rglob("*.md"):
        for _, name, _ in build_site.LINK.findall(build_site.FENCED.sub("", page.read_text())):
            if "source" in page.parts and page.suffixes != [".md"]:
                continue  # the source of a program
            assert "://" in name or (page.parent / name).exists(), f"{page.relative_to(pages)}: {name}"


def test_every_public_name_is_in_the_reference_and_has_a_docstring(pages, public_names):
    paths = public_names
    top_level = {name.removeprefix("ctl.") for name in paths if name.count(".") == 1}
    assert top_level == {*ctl.__all__} - {"__version__"}
    text = "".join(path.read_text() for path in (pages / "reference").glob("*.md"))
    entries = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert set(entries) == set(paths.values()) and len(set(entries)) == len(entries)
    headings = re.findall(r"^      heading: (\S+)$", text, re.MULTILINE)
    assert {"ctl.Trainer", "ctl.Topology", "ctl.hvd.allreduce", "ctl.hvd.elastic.State"} <= set(headings)
    assert set(headings) <= set(paths) and len(headings) == len(entries)
    assert build_site.undocumented(paths) == []


def test_every_callable_of_hvd_is_in_the_reference(public_names):
    functions = {n for n in hvd.__all__ if isinstance(getattr(hvd, n), (types.FunctionType, type))}
    assert {f"ctl.hvd.{name}" for name in functions} <= set(public_names) | {
        "ctl.hvd.SyncBatchNormalization", "ctl.hvd.run"
    }  # fmt: skip


def test_a_name_without_a_docstring_is_named(monkeypatch):
    tree = ast.parse("class Every:\n  'a'\n  def due(self): pass\n  def _own(self): pass\ndef run(): pass")
    definitions = {node.name: node for node in tree.body}
    monkeypatch.setattr(site_reference, "definition", definitions.get)
    assert build_site.undocumented({name: name for name in definitions}) == ["run", "Every.due"]


def test_the_site_is_built_without_a_warning():
    pytest.importorskip("mkdocs", reason="`make docs` installs mkdocs")
    command = [sys.executable, "docs/build_site.py"]
    result = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Trainer" in (ROOT / "build/site/reference/trainer.html").read_text()


def test_names_with_a_common_description_have_an_entry_each():
    """Griffe finds no type for a pair of names, and then takes that of the entry before."""
    pytest.importorskip("griffe", reason="`make docs` installs griffe")
    import site_examples

    text = "  a, b: Both\n    names.\n  c: One name."
    expected = "  a: Both\n    names.\n  b: Both\n    names.\n  c: One name."
    assert site_examples._NAMES.sub(site_examples.one_entry_per_name, text) == expected


def test_brackets_beside_a_link_are_no_reference(pages):
    """Markdown takes `[1] [name](address)` for a reference to "name"."""
    for page in pages.rglob("*.md"):
        if "````" in page.read_text():
            continue  # an unchanged file
        text = re.sub("`[^`]*`", "", build_site.FENCED.sub("", page.read_text()))
        assert not re.findall(r"\][ \n]?\[[^\]]+\]", text), page.relative_to(pages)


def test_links_have_titles_as_their_text():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        texts = re.findall(r"\[([^\]]+)\]\([^)]+\)", build_site.FENCED.sub("", page.read_text()))
        assert not [text for text in texts if re.search(r"\.(md|py|ipynb)\b", text)], page


def test_the_page_of_messages_is_current():
    text = generate_messages.PAGE.read_text()
    assert text == generate_messages.page(), "write it again with: python docs/generate_messages.py"
    assert "- UsageError: `strategy is {name}; expected one of" in text and "- help: `Task." in text
