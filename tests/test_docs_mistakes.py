"""Mistakes of docs/mistakes.md, repeated and compared with the messages on the page."""

import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import generate_mistakes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def generated():
    return generate_mistakes.generate_page()


def sections(text):
    return dict(re.findall(r"^## (\d+\. [^\n]*)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))


NAMES = list(sections(generate_mistakes.PAGE.read_text()))


def test_the_page_has_all_mistakes_and_the_trainer_that_is_run(generated):
    page = generate_mistakes.PAGE.read_text()
    assert len(NAMES) == len(generate_mistakes.MISTAKES) >= 15
    assert page.split("\n## ")[0] == generated.split("\n## ")[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_has_the_message_of_the_page(generated, name):
    page = sections(generate_mistakes.PAGE.read_text())
    assert page[name] == sections(generated)[name]


def test_each_mistake_raises_an_error_of_ctl(generated):
    for name, text in sections(generated).items():
        assert re.search(r"```text\n(UsageError|CheckpointError|NonFiniteError): ", text), name
