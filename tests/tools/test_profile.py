"""`ctl profile -- command` becomes the command, which measures; and words that cannot be used."""

import sys

import pytest
from ctl import cli
from ctl.profiling.profile_report import PROFILE_VARIABLE


def become(monkeypatch, *words):
    seen = []
    monkeypatch.setattr("os.execvpe", lambda *what: seen.append(what))
    cli.main(["profile", *words])
    return seen[0]


def test_the_command_gets_the_request_and_its_own_words(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path, words, environ = become(monkeypatch, "--json=p.json", "--", sys.executable, "-m", "models.mnist")
    assert (path, words) == (sys.executable, [sys.executable, "-m", "models.mnist"])
    assert environ[PROFILE_VARIABLE] == str(tmp_path / "p.json")
    assert become(monkeypatch, "--", sys.executable)[2][PROFILE_VARIABLE] == "-"


def test_a_sentence_at_the_start_says_which_commands_print_no_table(monkeypatch, capsys):
    become(monkeypatch, "--", sys.executable, "hi.py")
    assert "A command that does not train with ctl prints no table." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command was given after `--`"),
        (["--"], "no command was given after `--`"),
        (["python", "train.py"], "write the command after `--`"),
        (["--steps=5", "--", "python"], "--steps=5"),
        (["--", "no-such-program"], "was not found"),
    ],
)
def test_words_that_cannot_be_used_are_one_sentence(capsys, words, said):
    assert cli.main(["profile", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ctl profile: ") and said in err and "Traceback" not in err


def test_help_shows_both_forms_with_the_launcher(capsys):
    assert cli.main(["profile", "--help"]) == 0
    out = capsys.readouterr().out
    assert "ctl profile -- ctl launch" in out and "ctl launch -H a:1,b:1 -- ctl profile --" in out
