"""The studio's plans, and the way from a log to a fleet in a real browser."""

import http.client
import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.cli.main import main
from tests.support.browser import (
    DESK,
    PHONE,
    browser,
    complaints,
    is_wider_than_window,
    low_contrast,
)
from tests.support.studio import (
    ENTER,
    ask,
    copied,
    serving,
    wait_for_runs,
    wait_until_idle,
    wait_until_shown,
)

OWN = "when,in_tok,out_tok\n" + "".join(f"{k / 4},{200 + k % 7},{20 + k % 5}\n" for k in range(240))
NAMES = "arrival=when,prompt=in_tok,output=out_tok"
FEW = ("--set", "plan.min_duration=60", "--set", "plan.max_duration=60")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    goodput = "goodput={ttft: 1000, tpot: 60}"
    with serving("demo", "--set", "workload.num_prompts=300", "--set", goodput, *FEW) as (one, _):
        yield one


def test_a_gpu_has_its_price(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/")
    text = connection.getresponse().read().decode()
    start = text.partition('id="start">')[2].partition("</script>")[0]
    (knob,) = [one for one in json.loads(start)["knobs"] if one["name"] == "gpu"]
    notes = dict(zip(knob["values"], knob["notes"], strict=True))
    assert notes["A100-80GB"] == "$3.43/h"


@pytest.mark.medium
def test_a_plan_is_the_command_s(port: int, tmp_path: Path, monkeypatch, capsys) -> None:
    """Its lines come while it looks; its answer is what the command prints that it names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.csv").write_text(OWN)
    _, (upload,) = ask(port, OWN.encode(), f"/trace?name=own.csv&columns={NAMES}")
    asked = {"trace": upload["trace"], "knobs": {"gpu": "L40S"}, "question": "fewest"}
    status, lines = ask(port, asked, "/plan")
    assert status == 200
    *told, last = lines
    assert any("cluster.replicas=1 keeps the bounds" in line["told"] for line in told)
    assert last["command"][:2] == ["headway", "plan"]
    assert str(tmp_path) not in json.dumps(last)
    assert yaml.safe_load(last["yaml"])["workload"]["trace"]["path"] == "own.csv"
    assert "<!doctype html>" in last["page"]
    capsys.readouterr()
    assert main([*last["command"][1:], "--out", "found"]) == 0
    assert capsys.readouterr().out.partition("\nwritten to ")[0] == last["text"]


@pytest.mark.medium
def test_the_largest_load_is_looked_for_whatever_rate_is_turned(port: int) -> None:
    """A plan refuses a rate beside its search for one: the button was dead once it was turned."""
    _, (upload,) = ask(port, OWN.encode(), f"/trace?name=own.csv&columns={NAMES}")
    for knobs, trace in (({"rate_scale": 3}, upload["trace"]), ({"rate": 3.0}, "")):
        asked = {"knobs": knobs | {"ttft": 1000, "tpot": 50}, "trace": trace, "question": "rate"}
        _, lines = ask(port, asked, "/plan")
        assert "capacity" in lines[-1].get("text", ""), lines[-1]
        assert not any("rate" in word.partition("=")[0] for word in lines[-1]["command"])
        fewest = ask(port, asked | {"question": "fewest"}, "/plan")[1][-1]["command"]
        assert any(word.endswith(("=3", "=3.0")) for word in fewest)


def test_what_cannot_be_planned(port: int) -> None:
    status, (answer,) = ask(port, {"question": "--out"}, "/plan")
    assert (status, answer["errors"]) == (400, ["question: '--out' is none that is answered"])
    _, lines = ask(port, {"question": "fewest", "knobs": {"model": "llama-3-70b"}}, "/plan")
    assert lines[-1]["errors"]
    assert "headway: error" not in lines[-1]["errors"][0]


@pytest.mark.medium
def test_one_plan_at_a_time_and_one_that_nobody_waits_for_ends(port: int) -> None:
    first = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    first.request("POST", "/plan", json.dumps({"question": "buy"}))
    assert first.getresponse().status == 200
    status, (answer,) = ask(port, {"question": "rate"}, "/plan")
    assert (status, answer["errors"]) == (400, ["a plan is under way: cancel it first"])
    first.close()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        status, lines = ask(port, {"question": "rate", "knobs": {"model": "llama-3-70b"}}, "/plan")
        if status == 200:
            return
        time.sleep(0.2)
    raise AssertionError(lines)


def press(driver: Any, name: str) -> None:
    driver.find_element("id", name).send_keys(ENTER)


def wait_for_plan(driver: Any) -> str:
    """Wait until no plan is under way; give what the page says of it."""
    end = time.monotonic() + 60
    while not driver.find_element("id", "plan").is_enabled():
        assert time.monotonic() < end
        time.sleep(0.05)
    return str(driver.find_element("id", "plan-status").text)


def read_log(driver: Any, log: Path) -> None:
    """Choose a log whose columns have names of its own, and take what is proposed for them."""
    driver.find_element("id", "trace").send_keys(str(log))
    columns = driver.find_element("id", "columns")
    wait_until_shown(driver, "columns")
    assert columns.get_attribute("value") == NAMES
    press(driver, "read-columns")
    wait_for_runs(driver, 2)
    wait_until_idle(driver)


def plan_again(driver: Any) -> None:
    """Press Plan until there is an answer: one that was cancelled takes a moment to end."""
    while True:
        press(driver, "plan")
        if wait_for_plan(driver).startswith("Found after "):
            return
        assert "under way" in driver.find_element("id", "plan-errors").text
        time.sleep(0.2)


@pytest.mark.medium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [DESK, PHONE])
def test_from_my_log_to_this_fleet(
    port: int, tmp_path: Path, size: tuple[int, int], dark: bool
) -> None:
    """By keyboard: a log with columns of its own, a GPU by its price, pin, plan, take away."""
    log = tmp_path / "own.csv"
    log.write_text(OWN)
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    with browser(size, dark=dark, downloads=downloads) as driver:
        driver.get(f"http://127.0.0.1:{port}/")
        wait_for_runs(driver, 1)
        read_log(driver, log)
        told = driver.find_element("id", "traffic-told").text
        assert told.startswith("240 requests over 59.75 s")
        assert driver.find_element("id", "chart-arrivals").rect["width"] > 100
        press(driver, "pin")
        menu = driver.find_element("id", "knob-gpu")
        menu.send_keys("L40S")  # as one types in a menu
        wait_for_runs(driver, 3)
        wait_until_idle(driver)
        assert menu.find_element("css selector", ":checked").text == "L40S: $1.86/h"
        assert "own.csv" in driver.find_element("css selector", "#figures tr").text
        driver.find_element("id", "question").send_keys("How few")
        press(driver, "plan")
        assert driver.find_element("id", "plan-status").text.startswith("Looking for ")
        press(driver, "plan-cancel")
        asked = "How few replicas of this GPU do: own.csv, GPU L40S"
        assert wait_for_plan(driver) == f"Cancelled: {asked}"
        plan_again(driver)
        assert "cluster.replicas=1 carries the load" in driver.find_element("id", "plan-best").text
        assert yaml.safe_load(copied(driver, "plan-yaml"))["gpu"]["name"] == "L40S"
        driver.find_element("id", "question").send_keys("How much")
        driver.find_element("id", "no-log").send_keys(ENTER)
        wait_for_runs(driver, 4)
        press(driver, "plan")
        press(driver, "plan-cancel")  # the earlier answer stays, by its own question
        other = "How much load this fleet carries: demo, as it is"
        assert wait_for_plan(driver) == f"Cancelled: {other}. Below is the earlier answer"
        assert driver.find_element("id", "plan-title").text == asked
        assert yaml.safe_load(copied(driver, "plan-yaml"))["name"] == "own"
        words = shlex.split(copied(driver, "plan-cli"))
        assert words[:3] == ["headway", "plan", "demo"]
        assert words[-2:] == ["--fewest", "cluster.replicas=1..16"]
        press(driver, "plan-page")
        press(driver, "save-page")
        wanted = {"own-plan.html", "demo.html"}
        end = time.monotonic() + 60
        while {path.name for path in downloads.iterdir()} != wanted:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert not is_wider_than_window(driver)
        assert low_contrast(driver) == []
        assert [one for one in complaints(driver) if "/plan " not in one] == []


def shift(driver: Any, selector: str) -> list[int]:
    """Return by how many pixels a table is wider than its place, and starts right of it."""
    script = """const box = document.querySelector(arguments[0]).closest(".scroll");
    const left = (node) => node.getBoundingClientRect().left;
    const start = left(document.querySelector(".results"));
    return [box.scrollWidth - box.clientWidth, left(box) - start];"""
    return [round(value) for value in driver.execute_script(script, selector)]


@pytest.mark.medium
def test_tables_are_as_wide_as_the_page(port: int, tmp_path: Path) -> None:
    """At 1,060 pixels, a run pinned; a plan's heads sort, a client's latency has a row."""
    log = tmp_path / "own.csv"
    rows = OWN.splitlines()
    body = "".join(f"{row},{'paid' if k % 3 else 'free'}\n" for k, row in enumerate(rows[1:]))
    log.write_text(f"timestamp,input_tokens,output_tokens,client\n{body}")
    with browser((1060, 900)) as driver:
        driver.get(f"http://127.0.0.1:{port}/")
        wait_for_runs(driver, 1)
        driver.find_element("id", "trace").send_keys(str(log))
        wait_for_runs(driver, 2)
        press(driver, "pin")
        for name, value in {"whose": "client paid", "ttft": "900", "tpot": "70"}.items():
            place = f"#knob-{name}" if name == "whose" else f"[aria-label^='SLO: {name.upper()}']"
            keys = value if name == "whose" else f"\ue009a\ue000{value}{ENTER}"
            driver.find_element("css selector", place).send_keys(keys)
            wait_until_idle(driver)
        heads = driver.find_element("id", "figures").text.splitlines()
        assert [
            line.rpartition(", ms ")[0] for line in heads if line.startswith("client paid")
        ] == [
            "client paid: P99 TTFT",
            "client paid: P99 TPOT",
        ]
        assert any(line.startswith("SLO attainment of all requests, % ") for line in heads)
        driver.find_element("id", "question").send_keys("Which")
        press(driver, "plan")
        assert wait_for_plan(driver).startswith("Found after ")
        title = driver.find_element("id", "plan-title").text
        assert title.endswith("SLO: TTFT 900 ms, SLO: TPOT 70 ms, Whose SLO: 99 % of client paid")
        assert shift(driver, "#plan-table table") == [0, 0]
        assert shift(driver, "#figures") == [0, 0]
        assert not is_wider_than_window(driver)
        head = driver.find_element("css selector", "#plan-table th:last-child")
        driver.execute_script("arguments[0].click()", head)
        assert head.get_attribute("aria-sort") == "ascending"


HELD = """
const real = window.fetch;
window.held = true;
window.fetch = (...words) => (window.held ? new Promise(() => {}) : real(...words));
"""
"""Simulations without an end, while `held`."""


@pytest.mark.medium
def test_the_last_result_stays_while_the_next_is_computed(port: int) -> None:
    with browser() as driver:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": HELD})
        driver.get(f"http://127.0.0.1:{port}/")
        note, shown = driver.find_element("id", "last-told"), driver.find_element("id", "figures")
        status = driver.find_element("id", "status")
        assert status.text == "Simulating"
        assert not shown.is_displayed()  # no headings of nothing
        driver.execute_script("window.held = false;")
        press(driver, "reset")
        wait_for_runs(driver, 1)
        wait_until_idle(driver)
        assert not note.is_displayed()
        driver.execute_script("window.held = true;")
        driver.find_element("id", "knob-seats").send_keys("\ue012")
        assert (status.text, note.text) == (
            "Simulating",
            "Below is the last result: as the scenario is.",
        )
        assert shown.is_displayed()
        press(driver, "cancel")
        assert (status.text, note.is_displayed()) == ("Cancelled", True)
