"""What a result shows of itself, and how the package is called from Python."""

import simulator
from simulator import load_scenario, run
from tests.support.scenarios import SMALL


def test_a_result_shows_itself_in_a_line_and_in_a_table(write) -> None:
    result = run(load_scenario(write(SMALL.replace("name: ", "name: "), "a-b.yaml")))
    summary = result.summary()
    told = repr(result)
    assert "\n" not in told
    assert len(told) < 120
    assert f"{summary['completed']:,} requests in {summary['duration']:,.1f} s" in told
    assert f"requests/s {summary['request_throughput']:,.2f}" in told
    assert f"mean TTFT, ms {summary['mean_ttft_ms']:,.1f}" in told
    page = result._repr_html_()
    assert page.startswith("<table>")
    assert f"<td>{summary['mean_ttft_ms']:,.1f}</td>" in page
    assert page.count("<tr>") == page.count("</tr>") >= 6


def test_the_names_of_the_package_are_listed() -> None:
    names = dir(simulator)
    assert {*simulator.__all__, "__version__"} == {*names}
    assert all(getattr(simulator, name) is not None for name in names)
