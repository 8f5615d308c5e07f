"""Tables of which only what is asked for is imported."""

import pytest

from simulator.build.assemble_scheduler import BLOCKS
from simulator.build.choose_scheduler import SCHEDULERS
from simulator.build.policy_table import POLICIES
from simulator.costs.profile import FORMS
from simulator.util.imported import Imported
from simulator.workload.traces import FORMATS


@pytest.mark.parametrize("table", [POLICIES, FORMS, SCHEDULERS, BLOCKS])
def test_every_class_is_where_the_table_says(table: Imported[type]) -> None:
    """And is known by it."""
    for name, found in table.items():
        assert isinstance(found, type)
        assert table.name_of(found) == name
    assert table.name_of(Imported) is None


def test_every_format_has_its_name() -> None:
    """So that who is told of one can ask for it."""
    assert [form.name for form in FORMATS.values()] == list(FORMATS)


def test_what_is_no_name_is_not_there() -> None:
    """YAML may have a list in its place."""
    table: Imported[type] = Imported({"one": "builtins:int"})
    assert table["one"] is int
    assert ["one"] not in table
    with pytest.raises(KeyError):
        table["two"]
