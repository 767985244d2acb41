"""Comparison of the documented table of Horovod's API with `ctl.hvd`."""

import pytest
from conftest import ROOT
from ctl.errors import CtlError
from hvd import hvd_api

IDS = [f"{module}.{name}" for module, name, *_ in hvd_api.ROWS]


@pytest.mark.parametrize(("module", "name", "parameters", "status", "note"), hvd_api.ROWS, ids=IDS)
def test_a_name_of_the_api_is_there_with_its_parameters(module, name, parameters, status, note):
    value = hvd_api.resolve(module, name)
    assert callable(value) and value.__doc__
    if status == hvd_api.REFUSED:
        with pytest.raises(CtlError) as raised:
            value(*[None] * len(parameters.split()))
        assert isinstance(raised.value, NotImplementedError) and "hvd." in str(raised.value)
    else:
        assert hvd_api.missing_parameters(module, name, parameters) == []
        assert note or status == hvd_api.WORKS


@pytest.mark.parametrize("name", hvd_api.CONSTANTS)
def test_a_constant_is_there(name):
    assert hvd_api.resolve("ctl.hvd", name) is not None


def test_every_public_name_is_there():
    import ctl.hvd as hvd

    for name in hvd.__all__:
        assert getattr(hvd, name) is not None
    with pytest.raises(AttributeError, match="alreduce"):
        _ = hvd.alreduce


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "horovod.md").read_text()
    assert hvd_api.table() in page, "run docs/generate_horovod.py"
