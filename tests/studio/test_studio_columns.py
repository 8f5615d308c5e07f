"""The studio with a log whose columns nobody knows: a choice, and what is shown until then."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest

from headway.studio.columns import columns_of, unknown_columns
from tests.support.browser import (
    DESK,
    PHONE,
    browser,
    complaints,
    is_wider_than_window,
    low_contrast,
)
from tests.support.studio import ENTER, serving, wait_for_runs, wait_until_idle, wait_until_shown

ROWS = [(k / 4, 200 + k % 7, 20 + k % 5) for k in range(240)]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving("demo", "--set", "workload.num_prompts=300") as (number, _):
        yield number


def csv(path: Path, header: str) -> Path:
    path.write_text(f"{header}\n" + "".join(f"{a},{b},{c}\n" for a, b, c in ROWS))
    return path


@pytest.mark.parametrize(
    ("text", "names", "guess"),
    [
        ("t,x,y\n0,7,2\n1,6,3\n", ["t", "x", "y"], "arrival=t,prompt=x,output=y"),
        ("a,b,c\n7,3,0.5\n6,2,1\n", ["a", "b", "c"], "arrival=c,prompt=a,output=b"),
        (
            "nr,zeit,code,ein,aus\n1,2026-01-01 00:00:01,200,7,3\n2,2026-01-01 00:00:00,200,6,2\n",
            ["nr", "zeit", "code", "ein", "aus"],
            "arrival=zeit,prompt=ein,output=aus",
        ),
        ("x,out_tok,y\n1,2,9\n1,2,8\n", ["x", "out_tok", "y"], "prompt=y,output=out_tok"),
        ('{"a": 1, "n": {"b": 5, "c": 4}}\n' * 2, ["a", "b", "c"], "prompt=a,output=b"),
        ('"a,b",c,d=\n1,2,3\n', [], ""),  # `columns` could not say these
        ("nonsense\n", [], ""),
        ("a;b;c\n1;2;3\n", ["a", "b", "c"], "prompt=a,output=b"),
        ("who,said\nme,that\n", [], ""),
        ("arrival,prompt_tokens,output_tokens\n0,7,2\n", [], ""),  # known: there is no choice
        ("", [], ""),
    ],
)
def test_what_is_offered(tmp_path: Path, text: str, names: list[str], guess: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    assert unknown_columns(path) == (names, guess)


def test_a_flag_is_no_number_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "x"
    rows = (f"{k * 0.3},{k % 2},{k % 5 > 0:d},{500 + k},{100 + k}\n" for k in range(60))
    path.write_text("when,who,urg,a,b\n" + "".join(rows))
    assert unknown_columns(path)[1] == "arrival=when,prompt=a,output=b"


def test_what_is_offered_of_parquet(tmp_path: Path) -> None:
    path = tmp_path / "x"
    frame = pandas.DataFrame(ROWS, columns=["zeit", "ein", "aus"])
    frame["zeit"] = pandas.to_datetime(frame["zeit"], unit="s")
    frame.to_parquet(path)
    assert columns_of(path) == (["zeit", "ein", "aus"], "arrival=zeit,prompt=ein,output=aus")


def text_of(driver: Any, name: str) -> str:
    return str(driver.find_element("id", name).text)


@pytest.mark.medium
@pytest.mark.parametrize("size", [DESK, PHONE])
def test_until_a_log_is_played_all_says_whose_it_is(
    port: int, tmp_path: Path, size: tuple[int, int]
) -> None:
    """And there is no plan, also after a knob was turned, until its columns are chosen."""
    day = csv(tmp_path / "day.csv", "when,in_tok,out_tok")
    with browser(size, dark=size == PHONE) as driver:
        driver.get(f"http://127.0.0.1:{port}/")
        wait_for_runs(driver, 1)
        assert text_of(driver, "whose") == ""
        driver.find_element("id", "trace").send_keys(str(day))
        wait_until_shown(driver, "columns")
        told = "All below is of demo, not of day.csv: choose the columns"
        assert text_of(driver, "whose") == told
        assert "--" not in driver.find_element("tag name", "body").text
        plan = driver.find_element("id", "plan")
        assert not plan.is_enabled()
        assert plan.get_attribute("title") == "day.csv is not played: choose the columns"
        driver.find_element("id", "knob-seats").send_keys("\ue012")
        wait_for_runs(driver, 2)
        wait_until_idle(driver)
        assert (text_of(driver, "whose"), plan.is_enabled()) == (told, False)
        assert low_contrast(driver) == []
        assert not is_wider_than_window(driver)
        driver.find_element("id", "read-columns").send_keys(ENTER)
        assert wait_for_runs(driver, 3).startswith("240 requests")
        assert (text_of(driver, "whose"), plan.is_enabled()) == ("", True)
        bad = tmp_path / "bad.csv"
        bad.write_text("nonsense\n")
        driver.find_element("id", "trace").send_keys(str(bad))
        wait_until_shown(driver, "errors")
        assert text_of(driver, "whose").startswith("All below is of day.csv, not of bad.csv: ")
        assert text_of(driver, "status") == "This trace cannot be played"
        assert not plan.is_enabled()
        assert not driver.find_element("id", "columns").is_displayed()
        driver.find_element("id", "no-log").send_keys(ENTER)
        wait_for_runs(driver, 4)
        assert (text_of(driver, "whose"), plan.is_enabled()) == ("", True)
        assert complaints(driver) == []


@pytest.mark.medium
def test_columns_of_any_name_are_chosen(port: int, tmp_path: Path) -> None:
    """The guess is by their values; the words say what the menus do, and the other way round.

    A second choice begins with the first one's units.
    """
    from selenium.webdriver.support.select import Select

    with browser() as driver:
        driver.get(f"http://127.0.0.1:{port}/")
        wait_for_runs(driver, 1)
        driver.find_element("id", "trace").send_keys(str(csv(tmp_path / "x.csv", "zeit,aus,ein")))
        wait_until_shown(driver, "columns")
        arrival, prompt, output = (
            Select(driver.find_element("id", f"column-{field}"))
            for field in ("arrival", "prompt", "output")
        )
        words = driver.find_element("id", "columns")
        assert words.get_attribute("value") == "arrival=zeit,prompt=aus,output=ein"
        assert [one.text for one in prompt.options] == ["choose", "zeit", "aus", "ein"]
        for field in ("client", "priority"):
            menu = Select(driver.find_element("id", f"column-{field}"))
            assert [one.text for one in menu.options][:2] == ["none: all alike", "zeit"]
        prompt.select_by_visible_text("ein")
        assert words.get_attribute("value") == "arrival=zeit,prompt=ein,output=ein"
        driver.find_element("id", "read-columns").send_keys(ENTER)
        wait_until_shown(driver, "errors")
        assert "are both 'ein'" in text_of(driver, "errors")
        assert words.is_displayed()
        words.clear()
        words.send_keys("arrival=zeit:ms, prompt=ein")
        chosen = [menu.first_selected_option.text for menu in (arrival, prompt, output)]
        assert chosen == ["zeit", "ein", "choose"]
        output.select_by_visible_text("aus")
        assert words.get_attribute("value") == "arrival=zeit:ms,prompt=ein,output=aus"
        driver.find_element("id", "read-columns").send_keys(ENTER)
        assert wait_for_runs(driver, 2).startswith("240 requests")
        assert text_of(driver, "traffic-told").startswith("240 requests over 0.05975 s")
        assert words.get_attribute("value") == "arrival=zeit:ms,output=aus,prompt=ein"
        assert complaints(driver) == []


@pytest.mark.medium
def test_columns_of_known_names_may_be_chosen_too(port: int, tmp_path: Path) -> None:
    """Those without effect are named, and one becomes the client, whose levels may be set."""
    from selenium.webdriver.support.select import Select

    path = tmp_path / "x.csv"
    rows = (f"{k / 4},{'paid' if k % 5 else 'free'},{k % 3},90,9\n" for k in range(240))
    path.write_text("started_at,app,tier,prompt_tokens,completion_tokens\n" + "".join(rows))
    with browser() as driver:
        driver.get(f"http://127.0.0.1:{port}/")
        wait_for_runs(driver, 1)
        driver.find_element("id", "trace").send_keys(str(path))
        wait_for_runs(driver, 2)
        note = "Plays x.csv. Without effect: app, tier; choose above what has an effect"
        assert text_of(driver, "trace-told").startswith(note)
        assert not driver.find_elements("id", "knob-whose")
        known = "arrival=started_at,prompt=prompt_tokens,output=completion_tokens"
        words = driver.find_element("id", "columns")
        assert words.get_attribute("value") == known
        for field, name in (("client", "app"), ("priority", "tier")):
            Select(driver.find_element("id", f"column-{field}")).select_by_visible_text(name)
        driver.find_element("id", "read-columns").send_keys(ENTER)
        wait_for_runs(driver, 3)
        assert text_of(driver, "trace-told") == "Plays x.csv."
        whose = Select(driver.find_element("id", "knob-whose"))
        parts = {"client paid", "client free", "priority 0", "priority 1", "priority 2"}
        assert {one.text for one in whose.options} == {"all requests", *parts}
        assert complaints(driver) == []
