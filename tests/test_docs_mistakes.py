"""docs/mistakes.md says what its mistakes lead to: they are made again here."""

import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import generate_mistakes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made():
    return generate_mistakes.made()


def sections(text):
    return dict(re.findall(r"^## (\d+\. [^\n]*)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))


NAMES = list(sections(generate_mistakes.PAGE.read_text()))


def test_the_page_has_all_mistakes_and_the_trainer_that_is_run(made):
    page = generate_mistakes.PAGE.read_text()
    assert len(NAMES) == len(generate_mistakes.MISTAKES) >= 15
    assert page.split("\n## ")[0] == made.split("\n## ")[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_leads_to_what_the_page_says(made, name):
    page = sections(generate_mistakes.PAGE.read_text())
    assert page[name] == sections(made)[name]


def test_each_message_says_what_to_do(made):
    for name, text in sections(made).items():
        assert re.search(r"```text\n(UsageError|CheckpointError|NonFiniteError): ", text), name
