"""Each key of what a page asks the studio, with a value of another type: refused in words."""

import pytest

pytest.importorskip("aiohttp")

from tests.support.studio import ask, serving

WRONG = (None, True, -1, 1.5, 10**20, float("nan"), "\ud800", "a", [], ["buy"], [[]], {}, {"a": []})


@pytest.mark.medium
def test_no_wrong_type_is_a_fault_of_the_server() -> None:
    with serving("demo") as (port, _):
        for key in ("question", "trace", "knobs"):
            for value in WRONG:
                status, lines = ask(port, {"question": "none such", key: value}, "/plan")
                assert (status, len(lines)) == (400, 1), (key, value)
                assert lines[0]["errors"]
        for value in WRONG:
            status, lines = ask(port, {"knobs": {"max_num_seqs": value, "rate": value}})
            assert status == 400, value
        for value in WRONG:
            if not isinstance(value, dict):  # a mapping asks for the scenario as it is
                assert ask(port, value)[0] == 400, value
