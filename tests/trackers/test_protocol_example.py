"""The example and the list of events in the documents of metric writers."""

import re
import textwrap
import typing

import ctl
from conftest import ROOT
from ctl.metrics import protocol
from small_models import Small, every_step


def test_the_example_of_the_protocol_records_a_run_and_is_that_of_the_page(tmp_path):
    code = textwrap.dedent(re.search(r"    class RunTable.*?(?=\n\n\S)", protocol.__doc__, re.S)[0])
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert code.strip() in page
    names = {"ctl": ctl, "protocol": protocol}
    exec(code, names)
    table = names["RunTable"]()
    trainer = Small(strategy="default", model_dir=str(tmp_path), writers=[table], intervals=every_step())
    trainer.hparams = {"width": 16}
    trainer.train(2, export=["weights"])
    assert {("train", 1), ("train", 2)} <= table.rows.keys() and table.checkpoints[-1] == 2
    assert table.run_id == (tmp_path / "run_id").read_text().strip() and table.hparams["width"] == 16
    assert table.exports and table.end == ("done", "")


def test_the_page_lists_every_event():
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page, re.M)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == {event.__name__ for event in typing.get_args(protocol.Event)}
