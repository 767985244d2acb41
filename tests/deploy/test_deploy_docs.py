"""Pages of docs/deploy/: their lines run, their excerpts are printed, and their refused options fail."""

import re
import shlex

import pytest
from conftest import ROOT
from ctl import cli
from golden_cases import IMAGE, OUTPUT, PROGRAM, SHARED
from regenerate import manifest

PAGES = {name: (ROOT / "docs" / "deploy" / f"{name}.md").read_text("utf-8")
         for name in ("docker", "vertex", "kubernetes", "slurm")}  # fmt: skip
BASE = {
    "vertex": lambda options: [*([] if "--base_output" in options else [OUTPUT]), *PROGRAM],
    "kubernetes": lambda _: SHARED,
}


def lines(page):
    """Yields the arguments of every `ctl deploy` line of a page, without --output."""
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("ctl deploy "):
                yield [w for w in shlex.split(line)[2:] if not w.startswith("--output=")]


def refused(page):
    """Returns (options, message) of each item of the list of refused options."""
    below = PAGES[page].split("\n## Refused options\n")[1].split("\n## ")[0]
    return re.findall(r"^- `([^`]+)`: (.+)$", below, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_the_lines_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "task.py").touch()
    (tmp_path / "tf_ctl-0.1.0-py3-none-any.whl").touch()
    monkeypatch.chdir(tmp_path)
    command_lines = list(lines(page))
    assert command_lines
    for arguments in command_lines:
        assert cli.main(["deploy", *arguments]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", ["vertex", "kubernetes"])
def test_an_excerpt_is_part_of_the_output_of_a_line(page):
    printed = [manifest(arguments) for arguments in lines(page) if arguments[0] == page]
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        assert any(block in text for text in printed), block


@pytest.mark.parametrize(("page", "options", "message"), [
    (page, options, message) for page in BASE for options, message in refused(page)
])  # fmt: skip
def test_options_that_a_page_lists_as_refused_are_refused(page, options, message, capsys):
    image = [] if "--image" in options else [IMAGE]
    arguments = [page, *image, *shlex.split(options), *BASE[page](options)]
    assert cli.main(["deploy", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_every_option(page, capsys):
    assert cli.main(["deploy", page, "--help"]) == 0
    options = set(re.findall(r"^  (--[a-z_]+)", capsys.readouterr().out, re.MULTILINE))
    text = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    assert options - {"--output", "--force"} <= set(re.findall(r"--[a-z_]+", text))
