"""Checks of README.md and docs/: code, flags of commands, links and lists.

A block that starts with ```python is run, all of one page in order, in one process per page. A block
that cannot run alone starts with ```python no-run; such blocks are few.
"""

import ast
import functools
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import processes
import pytest
from absl import flags
from conftest import ROOT, environment
from ctl import errors
from ctl.config_flags import define_flags
from ctl.deploy import args as deploy_args
from ctl.deploy import slurm
from ctl.deploy.docker import command as docker_command
from ctl.deploy.kubernetes import options as kubernetes_options
from ctl.deploy.vertex import options as vertex_options
from ctl.distribute.platforms import detection
from ctl.launch.cli import parse_launch
from ctl.launch.horovodrun_options import parse_ctlrun
from ctl.tools import sweep

MESSAGES = ROOT / "docs/messages.md"  # a reference list
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
RUN_TIMEOUT_SECS = 600
MAX_LINES = 220
MAX_NO_RUN = 3
GENERATED_MARKER = "<!-- Written by"  # by a program, as a reference list
DEPLOY_MODULES = {
    "docker": docker_command, "kubernetes": kubernetes_options, "slurm": slurm, "vertex": vertex_options,
}  # fmt: skip


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str, note: str = "") -> list[tuple[int, str]]:
    """Returns (number of the line before the block, text) of the blocks of a language."""
    text = path.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, m.start()) + 1, m[3])
        for m in FENCE.finditer(text)
        if m[1] == language and m[2] == note
    ]


def program(path: Path) -> str:
    """Returns the python blocks of a page, on the same lines as in the page."""
    lines: list[str] = []
    for before, text in blocks(path, "python"):
        lines += [""] * (before - len(lines)) + text.splitlines()
    return "\n".join(lines) + "\n"


def items(path: Path, heading: str) -> list[tuple[str, str]]:
    """Returns (code, text) of each "- `code`: text" below a heading."""
    below = path.read_text(encoding="utf-8").split(f"\n{heading}\n", 1)[1].split("\n## ")[0]
    return re.findall(r"^- `([^`]+)`: (.+)$", below, re.MULTILINE)


def shell_lines() -> list[tuple[str, str]]:
    lines = []
    for path in PAGES:
        for _, text in blocks(path, "sh"):
            lines += [(label(path), line) for line in text.replace("\\\n", " ").splitlines() if line]
    return lines


def command_of(line: str) -> list[str]:
    """Returns the arguments of a shell line, without comments and leading NAME=value."""
    command = shlex.split(line, comments=True)
    while command and re.match(r"[A-Z_]+=", command[0]):
        command = command[1:]
    return command


def flags_of(model: str) -> flags.FlagValues:
    """Returns the flags of one model and of ctl. Some flags are defined by several models."""
    values = flags.FlagValues()
    define_flags(values)
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in dir(flags) if n.startswith("DEFINE_")]:
            define = functools.partial(getattr(flags, name), flag_values=values)
            patch.setattr(flags, name, define)
        module = {"models.flowers": "models.flowers.__main__"}.get(model, model)
        runpy.run_module(module, run_name="read for its flags")
    return values


def check_command(command: list[str]) -> None:
    """Fails for a flag that the program does not have, or a value it does not take."""
    if command[:2] == ["ctl", "launch"] or command[:3] == ["python", "-m", "ctl.launch"]:
        options, inner = parse_launch(command[2:] if command[0] == "ctl" else command[3:])
        if options is not None:
            check_command(inner)
    elif command[:2] == ["ctl", "deploy"]:
        options = deploy_args.read_arguments(DEPLOY_MODULES[command[2]].parser(), command[3:])
        assert options is not None
        check_command(list(options.program))
    elif command[:1] == ["ctlrun"]:
        check_command(parse_ctlrun(command[1:])[1])
    elif command[:2] == ["ctl", "sweep"]:
        options, swept_command = sweep.parser().read(command[2:])
        _, runs = sweep.plan_runs(swept_command, "sweep", options.random, options.seed)
        check_command(runs[0].command)
    elif command[:2] == ["python", "-m"] and re.match(r"models\.(?!horovod)", command[2]):
        flag_arguments = [w for w in command[3:] if w not in ("--help", "--helpfull")]
        assert flags_of(command[2])([command[2], *flag_arguments]) == [command[2]]
    elif command[:1] == ["python"] and len(command) > 1 and not command[1].startswith("-"):
        values = flags.FlagValues()
        if command[1] == "first.py":  # the program that docs/first_model.md writes
            define_flags(values)
            assert values(command[1:]) == ["first.py"]
        else:
            assert (ROOT / command[1]).is_file(), command[1]
    elif command[:1] == ["make"]:
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {w for w in command[1:] if "=" not in w} <= set(targets)


# test_docs_libraries.py runs the page of other libraries, section by section
RUN_PAGES = [page for page in PAGES if blocks(page, "python") and page.stem != "libraries"]


@pytest.mark.parametrize("page", RUN_PAGES, ids=label)
def test_the_code_of_a_page_runs(page, tmp_path):
    path = tmp_path / f"page_{page.stem}.py"  # keras.py would hide the package
    path.write_text(program(page), encoding="utf-8")
    result = processes.run(
        [sys.executable, str(path)], cwd=tmp_path, env=environment(), timeout=RUN_TIMEOUT_SECS,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert result.returncode == 0, f"{label(page)}, same line numbers:\n{result.stdout[-3000:]}"


def test_few_blocks_of_code_are_not_run():
    notes = {m[2] for p in PAGES for m in FENCE.finditer(p.read_text("utf-8")) if m[1] == "python"}
    assert notes <= {"", "no-run"}
    assert sum(len(blocks(p, "python", "no-run")) for p in PAGES) <= MAX_NO_RUN


@pytest.mark.parametrize(("page", "line"), shell_lines())
def test_a_shell_line_names_flags_and_targets_that_exist(page, line):
    check_command(command_of(line))


def test_the_check_of_shell_lines_detects_mistakes():
    with pytest.raises(flags.UnrecognizedFlagError):
        check_command(command_of("ctl launch --workers=2 -- python -m models.mnist --bach_size=3"))
    with pytest.raises(errors.UsageError, match="--hots"):
        check_command(command_of("ctlrun -np 2 --hots=a:1 python -m models.mnist"))
    with pytest.raises(errors.UsageError, match="--wrkers"):
        check_command(command_of("ctl launch --wrkers=2 -- python -m models.mnist"))
    with pytest.raises(errors.UsageError, match="--wrkers"):
        check_command(command_of("ctl deploy vertex --wrkers=2 -- python -m models.mnist"))
    with pytest.raises(AssertionError):
        check_command(command_of("make minst"))


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_lead_to_files_and_headings(page):
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{label(page)} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{label(page)} links to {link}"
            assert "--" not in anchor, f"{label(page)}: the site has another anchor than {anchor}"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_a_page_is_short_and_its_json_is_json(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    is_generated = page == MESSAGES or any(line.startswith(GENERATED_MARKER) for line in lines[:4])
    assert len(lines) <= MAX_LINES or is_generated
    for _, text in blocks(page, "json"):
        for line in text.splitlines():
            json.loads(line)


@pytest.mark.parametrize("folder", [ROOT / "docs", ROOT / "docs" / "decisions"], ids=label)
def test_the_index_of_a_folder_names_every_page(folder):
    index = (folder / "index.md").read_text(encoding="utf-8")
    for page in folder.glob("*.md"):
        if page.name != "index.md" and page != MESSAGES:
            assert f"({page.name})" in index, f"{label(page)} is missing"


def runs_by_default(path):
    """Returns whether a test of the file is not marked as slow."""
    functions = [n for n in ast.parse(path.read_text("utf-8")).body if isinstance(n, ast.FunctionDef)]
    marks = [map(ast.unparse, f.decorator_list) for f in functions if f.name.startswith("test_")]
    return any("pytest.mark.slow" not in of_test for of_test in marks)


def test_every_fault_in_reliability_has_test_files_that_run_by_default():
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    lines = re.split(r"\n(?=- |\n)", page.partition("## Processes")[2].partition("## NaN")[0])
    faults = [line for line in lines if line.startswith("- **")]
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py") if runs_by_default(path)}
    assert len(faults) > 50
    for fault in faults:
        named = re.findall(r"`(test_\w+)`", fault)
        assert named and set(named) <= files, fault


def test_the_tree_for_contributors_is_the_repository():
    text_blocks = blocks(ROOT / "CONTRIBUTING.md", "text")
    tree = next(text for _, text in text_blocks if text.startswith("ctl/"))
    folders, named_paths = [ROOT], set()
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        path = folders[depth] / name
        assert path.exists(), f"the tree names {path}"
        folders[depth + 1 :] = [path]
        named_paths.add(path)
    modules = [p for p in (ROOT / "ctl").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    missing = {p.name for p in modules} - {p.name for p in named_paths} - {"__init__.py", "__main__.py"}
    assert not missing, f"give each a phrase in CONTRIBUTING's tree: {sorted(missing)}"


def test_the_messages_for_a_wrong_tf_config_are_those_in_the_list():
    messages = items(ROOT / "docs/strategies.md", "## Errors in TF_CONFIG")
    assert len(messages) >= 6
    for text, message in messages:
        with pytest.raises(errors.UsageError) as caught:
            detection.read_topology({"TF_CONFIG": text})
        assert message in str(caught.value)


def test_the_exit_codes_are_those_in_the_list():
    page = (ROOT / "docs/several_machines.md").read_text(encoding="utf-8")
    codes = re.findall(r"^- (\d+):", page.split("\n## Exit codes of a worker\n")[1], re.MULTILINE)
    defined_codes = {v for k, v in vars(errors).items() if k.startswith("EXIT_")}
    assert {int(code) for code in codes} == defined_codes
