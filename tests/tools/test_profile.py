"""`ctl profile -- command`: execution of the command with a request to measure, and invalid arguments."""

import sys

import pytest
from ctl import cli
from ctl.profiling.profile_report import PROFILE_VARIABLE


def run_profile(monkeypatch, *arguments):
    calls = []
    monkeypatch.setattr("os.execvpe", lambda *args: calls.append(args))
    cli.main(["profile", *arguments])
    return calls[0]


def test_the_command_gets_the_request_and_its_own_arguments(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = ["--json=p.json", "--", sys.executable, "-m", "models.mnist"]
    path, command, environ = run_profile(monkeypatch, *arguments)
    assert (path, command) == (sys.executable, [sys.executable, "-m", "models.mnist"])
    assert environ[PROFILE_VARIABLE] == str(tmp_path / "p.json")
    assert run_profile(monkeypatch, "--", sys.executable)[2][PROFILE_VARIABLE] == "-"


def test_a_message_at_the_start_names_commands_without_a_table(monkeypatch, capsys):
    run_profile(monkeypatch, "--", sys.executable, "hi.py")
    assert "A command that does not train with ctl prints no table." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error_message"),
    [
        ([], "no command was given after `--`"),
        (["--"], "no command was given after `--`"),
        (["python", "train.py"], "write the command after `--`"),
        (["--steps=5", "--", "python"], "--steps=5"),
        (["--", "no-such-program"], "was not found"),
    ],
)
def test_unusable_arguments_are_refused_with_one_message(capsys, arguments, error_message):
    assert cli.main(["profile", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ctl profile: ") and error_message in err and "Traceback" not in err


def test_help_shows_both_forms_with_the_launcher(capsys):
    assert cli.main(["profile", "--help"]) == 0
    out = capsys.readouterr().out
    assert "ctl profile -- ctl launch" in out and "ctl launch -H a:1,b:1 -- ctl profile --" in out
