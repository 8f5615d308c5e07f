"""The studio with a trace of one's own: any file that `headway trace describe` reads."""

import gzip
import io
import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlencode

import pandas
import pytest
import yaml

from headway.studio.server import Studio
from headway.traffic.describe import describe
from simulator.workload.traces import read, read_trace
from tests.support.browser import browser
from tests.support.studio import ENTER, ask, copied, serving, wait_for_runs

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{k:02}.0000000,{100 + k},{10 + k}\n" for k in range(40)
)


OWN = "when,in_tok,out_tok\n0,10,20\n2.5,30,40\n"
NAMES = "arrival=when,prompt=in_tok,output=out_tok"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving("demo", "--set", "workload.num_prompts=600") as (number, _):
        yield number


@pytest.mark.medium
def test_traces_are_read_as_data_and_no_larger_than_allowed(port: int) -> None:
    status, (answer,) = ask(port, TRACE.encode(), "/trace?name=azure.csv")
    assert status == 200, answer
    assert answer["knobs"][0]["name"] == "rate_scale"
    assert answer["name"] == "azure"
    status, lines = ask(port, {"trace": answer["trace"], "knobs": {"rate_scale": 2}})
    assert lines[-1]["requests"] == 40
    # What is copied names the file, not where the studio keeps it.
    engine, levels, _, workload, *_ = lines[-1]["settings"]
    assert engine == 'engine={"name": "vllm"}'  # a log is of a server
    assert levels == "goodput=null"  # and of levels of its own
    assert not lines[-1]["bounds"]
    _, told = ask(port, {"trace": answer["trace"], "question": "fewest"}, "/plan")
    assert told[-1]["errors"] == ["a plan needs a service level: set SLO: TTFT, SLO: TPOT or both"]
    assert workload == 'workload={"trace": {"path": "azure.csv"}}'
    scenario = yaml.safe_load(lines[-1]["yaml"])
    assert scenario["workload"]["trace"]["path"] == "azure.csv"
    assert "{" not in lines[-1]["yaml"].replace("{}", "")  # in block style
    for body, error in (
        (b"PK\x03\x04" + bytes(100), "x.csv: is packed, and not by gzip"),
        (b"\x1f\x8b" + bytes(100), "x.csv:1: gzip: cut short or damaged"),
        (gzip.compress(bytes(2**28 + 1), 1), "x.csv: has more than 256 MiB, unpacked"),
        (b"x" * (32 * 2**20 + 1), "x.csv: has more than 32 MiB"),
        (b"nonsense\n", "x.csv:"),
    ):
        status, lines = ask(port, body, "/trace?name=../../x.csv")
        assert status == 200
        assert error in " ".join(lines[0]["errors"])


@pytest.mark.parametrize(
    ("called", "name"),
    [("12.csv", "12"), ("-a: b'\n.gz", "a b"), ("...", "trace"), ("ö" * 200 + ".csv", "ö" * 100)],
)
def test_a_scenario_is_named_after_its_log(port: int, called: str, name: str) -> None:
    _, (answer,) = ask(port, TRACE.encode(), f"/trace?{urlencode({'name': called})}")
    _, lines = ask(port, {"trace": answer["trace"]})
    assert answer["name"] == yaml.safe_load(lines[-1]["yaml"])["name"] == name


def test_every_file_that_trace_describe_reads(port: int, tmp_path: Path) -> None:
    """By gzip, as Parquet, as a server's log, and with columns of its own names."""
    frame = pandas.read_csv(io.StringIO(OWN))
    frame.to_parquet(tmp_path / "x.parquet")
    for body, columns in (
        (gzip.compress(TRACE.encode()), ""),
        (b'{"timestamp": 0, "input_length": 9, "output_length": 3}\n' * 2, ""),
        (OWN.encode(), NAMES),
        ((tmp_path / "x.parquet").read_bytes(), NAMES),
    ):
        path = tmp_path / "x"
        path.write_bytes(body)
        expected = describe(read_trace(path, columns=columns or None), "")
        query = urlencode({"name": "x", "columns": columns})
        _, (answer,) = ask(port, body, f"/trace?{query}")
        _, lines = ask(port, {"trace": answer["trace"]})
        assert lines[-1]["traffic"] == expected | {"source": lines[-1]["traffic"]["source"]}
    _, (answer,) = ask(port, OWN.encode(), "/trace?name=x.csv")
    assert answer == {"errors": [], "names": ["when", "in_tok", "out_tok"], "columns": NAMES}


def test_an_upload_is_read_once(tmp_path: Path, monkeypatch) -> None:
    """It was read for its knobs, and again for what became of its columns."""
    path = tmp_path / "x.trace"
    path.write_text("timestamp,input_tokens,output_tokens,client\n0,9,3,a\n1,9,3,b\n")
    reads: list[str] = []
    format_of = read.format_of
    monkeypatch.setattr(read, "format_of", lambda *told: reads.append("") or format_of(*told))
    studio = Studio("demo", ["workload.num_prompts=2"], tmp_path)
    try:
        knobs, used = studio._read(path, "")
    finally:
        studio.worker.close()
    assert len(reads) == 1
    assert knobs[-1].values == ["all requests", "client a", "client b"]
    assert used["columns"]["used"]["input_tokens"] == "prompt"


@pytest.mark.medium
def test_a_trace_of_ones_own(port: int, tmp_path: Path) -> None:
    """It keeps the knobs, and what is copied names it; a link cannot carry it, and says so."""
    path = tmp_path / "mine.csv"
    path.write_text(TRACE)
    with browser() as driver:
        turned = quote(json.dumps({"seats": 4, "rate": 2}))
        driver.get(f"http://127.0.0.1:{port}/#{turned}")
        wait_for_runs(driver, 1)
        driver.find_element("id", "trace").send_keys(str(path))
        assert wait_for_runs(driver, 2).startswith("40 requests")
        assert driver.find_elements("id", "knob-rate_scale")
        assert driver.find_element("id", "knob-seats").get_attribute("aria-valuetext") == "4"
        told = driver.find_element("id", "trace-told").text
        assert told == "Plays mine.csv. Its own now: Requests/s."
        words = shlex.split(copied(driver, "copy-cli"))
        assert words[5:] == [
            *("--set", "goodput=null", "--set", "workload.num_prompts=600"),
            *("--set", 'workload={"trace": {"path": "mine.csv"}}'),
            *("--set", 'name="mine"', "--set", 'description=""'),
            *("--set", "engine.max_num_seqs=4"),
        ]
        assert "names mine.csv" in driver.find_element("id", "copied").text
        text = copied(driver, "copy-yaml", clipboard=False)
        shown = driver.find_element("id", "copied-text")
        assert shown.text == text.strip()  # with its line breaks
        scenario = yaml.safe_load(text)
        assert scenario["workload"]["trace"]["path"] == "mine.csv"
        assert (scenario["name"], "description" in scenario) == ("mine", False)
        assert driver.find_element("id", "name").text == "mine.csv"
        assert driver.title == "mine.csv, studio"
        address = copied(driver, "copy-link")
        assert "mine.csv must be chosen again" in driver.find_element("id", "copied").text
        driver.get("about:blank")
        driver.get(address)
        wait_for_runs(driver, 1)
        told = driver.find_element("id", "link-told")
        assert "of the trace mine.csv, which a link cannot carry: choose the file" in told.text
        assert driver.find_element("id", "knob-seats").get_attribute("aria-valuetext") == "4"
        driver.find_element("id", "trace").send_keys(str(path))
        wait_for_runs(driver, 2)
        assert told.text == ""
        assert driver.find_element("id", "knob-seats").get_attribute("aria-valuetext") == "4"
        path.write_text("nonsense\n")
        driver.find_element("id", "reset").send_keys(ENTER)  # turns knobs back, and keeps the log
        assert wait_for_runs(driver, 3).startswith("40 requests")
        assert driver.find_element("id", "name").text == "mine.csv"
        assert driver.find_element("id", "knob-seats").get_attribute("aria-valuetext") == "256"
        driver.find_element("id", "no-log").send_keys(ENTER)
        wait_for_runs(driver, 4)
        assert not driver.find_element("id", "no-log").is_displayed()
        assert (driver.find_element("id", "name").text, driver.title) == ("demo", "demo, studio")
        driver.find_element("id", "trace").send_keys(str(path))
        end = time.monotonic() + 20
        while not driver.find_element("id", "errors").text and time.monotonic() < end:
            time.sleep(0.05)
        assert driver.find_element("id", "status").text == "This trace cannot be played"


@pytest.mark.medium
def test_a_link_keeps_a_level_that_the_scenario_had_too(port: int, tmp_path: Path) -> None:
    """1,000 ms are the demo's own bound, and a log has none: the log was played without."""
    path = tmp_path / "mine.csv"
    path.write_text(TRACE)
    with browser() as driver:
        values = quote(json.dumps({"trace": "mine.csv", "ttft": 1000, "rate_scale": 2}))
        driver.get(f"http://127.0.0.1:{port}/#{values}")
        wait_for_runs(driver, 1)
        driver.find_element("id", "trace").send_keys(str(path))
        wait_for_runs(driver, 2)
        shown = [
            driver.find_element("id", f"knob-{name}").get_attribute("aria-valuetext")
            for name in ("ttft", "rate_scale")
        ]
        assert shown == ["1,000", "2"]
