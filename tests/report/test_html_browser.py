"""The report in a real browser: themes, contents, numbers as CSV, on a desk and on a phone."""

import csv
import time
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.figures.data import read_runs
from headway.figures.style import COLORS, DARK_COLORS, DARK_PHASES, PHASES
from headway.report.html.page import page
from tests.support.browser import (
    DESK,
    PHONE,
    browser,
    complaints,
    is_wider_than_window,
    low_contrast,
)

SCENARIO = """
name: seats
model: llama-3-8b
gpu: {name: A100-80GB}
engine: {max_num_seqs: 150, enable_prefix_caching: false}
workload: {num_prompts: 400, request_rate: inf, input_len: 100, output_len: 200, range_ratio: 0.8}
goodput: {ttft: 2000, tpot: 40}
slo: [output_throughput>=500]
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """A page of two runs, one of which takes several times as long, with 150 seats."""
    top = tmp_path_factory.mktemp("browser")
    (top / "s.yaml").write_text(SCENARIO, "utf-8")
    vary = ["--vary", "engine.scheduling_policy=fcfs,{policy: static, batch_size: 16}"]
    assert main(["compare", str(top / "s.yaml"), *vary, "--out", str(top / "c"), "--quiet"]) == 0
    path = top / "r.html"
    path.write_text(page(read_runs([top / "c"])), "utf-8")
    return path


@pytest.mark.medium
@pytest.mark.parametrize("size", [DESK, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_it_can_be_read(report: Path, size: tuple[int, int], dark: bool) -> None:
    """Texts have a contrast of level AA, colours are those of the pictures, nothing sticks out."""
    with browser(size, dark=dark) as driver:
        driver.get(report.as_uri())
        assert low_contrast(driver) == []
        assert not is_wider_than_window(driver)
        assert complaints(driver) == []
        value = "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0])"
        runs, phases = (DARK_COLORS, DARK_PHASES) if dark else (COLORS, PHASES)
        assert driver.execute_script(value, "--run-1").strip() == runs[1]
        assert driver.execute_script(value, "--prefill").strip() == phases["prefill"]
        assert {*runs}.isdisjoint(phases.values())
        hints = driver.find_elements("class name", "hint")
        if size == PHONE:
            assert hints
            box = driver.execute_script("return document.querySelector('.scroll.more')")
            script = """
            const left = () => arguments[0].querySelector('th').getBoundingClientRect().left;
            const before = left();
            arguments[0].scrollLeft = 60;
            return [before, left()];
            """
            before, after = driver.execute_script(script, box)
            assert before == after  # the first column stays in sight


@pytest.mark.medium
def test_contents_theme_and_numbers(report: Path, tmp_path: Path) -> None:
    with browser(downloads=tmp_path) as driver:
        driver.get(report.as_uri())
        links = driver.find_elements("css selector", "nav a")
        names = [link.text for link in links]
        assert names.index("Latency") < names.index("Requests in the batch")
        links[-1].send_keys("\ue007")  # Enter
        assert driver.current_url.endswith("#cost-model")
        root = driver.find_element("css selector", "html")
        button = driver.find_element("id", "theme")
        seen = []
        for _ in range(3):
            button.send_keys("\ue007")
            seen.append((button.text, root.get_attribute("data-theme")))
        assert seen == [
            ("Theme: light", "light"),
            ("Theme: dark", "dark"),
            ("Theme: system", "light"),
        ]
        driver.execute_script(
            "document.querySelectorAll('[data-kind=cdf]')[1]"  # the first is the verdict's
            ".closest('figure').querySelector('.csv').click()"
        )
        path = tmp_path / "latency-ttft-ms.csv"
        for _ in range(100):
            if path.exists():
                break
            time.sleep(0.05)
        rows = list(csv.reader(path.read_text("utf-8").splitlines()))
        assert rows[0][:2] == ["ms", "fcfs"]
        assert [float(cell) for cell in rows[-1][1:]] == [100.0, 100.0]
        assert complaints(driver) == []


@pytest.mark.medium
def test_many_seats_are_counted_and_a_slow_run_is_cut(report: Path) -> None:
    """Of 150 seats the picture shows how many are in which phase; the note says who goes on."""
    with browser() as driver:
        driver.get(report.as_uri())
        seats = driver.find_element("css selector", "[data-kind=seats]")
        assert "decode" in seats.text
        assert "prefill" in seats.text
        notes = " ".join(note.text for note in driver.find_elements("class name", "note"))
        assert "How many seats compute prompts" in notes
        assert "A row is a seat" not in notes
        assert "Not all of the time is in view, goes on: policy-static-batch_size-16" in notes
