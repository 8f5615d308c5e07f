"""The studio: its knobs, its server against bad input, and its page in a real browser."""

import contextlib
import http.client
import json
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from headway.cli.main import main
from headway.studio.knobs import knobs_of, overrides
from headway.studio.worker import Job, Superseded, answers
from simulator import load_scenario, run
from simulator.models.gpus import find_gpu
from simulator.util.errors import HeadwayError
from tests.support.browser import (
    DESK,
    PHONE,
    browser,
    complaints,
    is_wider_than_window,
    low_contrast,
    window,
)
from tests.support.studio import ENTER, ask, copied, serving, wait_for_runs, wait_until_idle
from tests.support.twins import malformed

TAB, LEFT, HOME = "\ue004", "\ue012", "\ue011"
ALL_OF_IT = "\ue009a\ue000"  # Ctrl-A


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving("demo", "--set", "workload.num_prompts=600") as (number, _):
        yield number


def test_knobs_set_what_was_turned() -> None:
    knobs = knobs_of(load_scenario("demo"))
    assert overrides(knobs, {}) == []
    assert overrides(knobs, {"seats": 256, "rate": 5.53}) == []  # as the scenario says
    assert overrides(knobs, {"seats": 64}) == ["engine.max_num_seqs=64"]
    assert overrides(knobs, {"seats": 63}) == ["engine.max_num_seqs=63"]  # typed
    sizes = ["engine.max_num_batched_tokens=null", "engine.max_num_seqs=null"]
    assert overrides(knobs, {"gpu": "H200"}) == ['gpu.name="H200"', *sizes, "cost=null"]
    own = overrides(knobs, {"gpu": "H200", "tokens": 512})  # asked for, though it is the scenario's
    assert own == ['gpu.name="H200"', "engine.max_num_batched_tokens=512", sizes[1], "cost=null"]
    wrong = (("seats", 1025), ("seats", 63.5), ("seats", "64"), ("seats", True))
    for name, value in (*wrong, ("policy", "os:system")):
        with pytest.raises(HeadwayError, match=r"is not (one of its values|from 1 to 1024)"):
            overrides(knobs, {name: value})
    assert overrides(knobs, {"tpot": "none"}) == ["goodput.tpot=null"]
    for given, error in (([], "is no mapping"), ({"engine": 1}, "there is no 'engine'")):
        with pytest.raises(HeadwayError, match=error):
            overrides(knobs, given)


def test_levels_may_be_of_one_client_or_priority() -> None:
    """Those who have requests are in the menu; the bounds are the knobs'."""
    given = ["workload.clients=2", "workload.priorities=[0, 3]", "workload.num_prompts=50"]
    knobs = knobs_of(load_scenario("demo", given))
    (menu,) = [knob for knob in knobs if knob.name == "whose"]
    assert {*menu.values[1:]} == {"client client-0", "client client-1", "priority 0", "priority 3"}
    keys = overrides(knobs, {"whose": "priority 3", "ttft": 700})
    slo = ["priority 3: p99_ttft_ms<=700", "priority 3: p99_tpot_ms<=50.0"]
    assert keys == ["goodput.ttft=700", f"slo={json.dumps(slo)}"]
    found = run(load_scenario("demo", [*given, *keys])).summary()["headway"]["slo"]
    assert found[0]["bound"] == "priority 3:p99_ttft_ms<=700"
    assert "whose" not in [knob.name for knob in knobs_of(load_scenario("demo"))]


@pytest.mark.parametrize("key", ["slo", "plan.slo"])
def test_levels_of_the_scenario_are_what_the_knobs_turn(key: str) -> None:
    """They turned goodput, which nothing reads where there are percentiles."""
    given = [f'{key}=["priority 0: p99_ttft_ms<=9", "p90_ttft_ms<=800", "mean_itl_ms<=30"]']
    given.append("workload.clients=2")
    given.append("workload.priorities=[0, 3]")
    knobs = knobs_of(load_scenario("demo", given))
    ttft, tpot = (next(one for one in knobs if one.name == name) for name in ("ttft", "tpot"))
    assert (ttft.label, ttft.value) == ("SLO: P90 TTFT, ms", 800)
    assert (tpot.label, tpot.value) == ("SLO: P99 TPOT, ms", "none")
    turned = overrides(knobs, {"ttft": 500, "tpot": 40})
    own = ["priority 0: p99_ttft_ms<=9", "p90_ttft_ms<=500", "mean_itl_ms<=30", "p99_tpot_ms<=40"]
    assert turned == [f"{name}={json.dumps(own)}" for name in dict.fromkeys(["slo", key])]
    assert overrides(knobs, {"ttft": "none"})[0] == f"slo={json.dumps([own[0], own[2]])}"
    found = run(load_scenario("demo", [*given, *turned, "workload.num_prompts=50"])).summary()
    assert [one["bound"] for one in found["headway"]["slo"]][1] == "p90_ttft_ms<=500"
    goodput = knobs_of(load_scenario("demo", ["slo=[goodput>=0.95]"]))
    assert overrides(goodput, {"ttft": 500}) == ["goodput.ttft=500"]


def test_another_gpu_has_its_engine_s_own_sizes() -> None:
    """And a finding has the knob that this page can turn."""
    knobs = knobs_of(load_scenario("demo"))
    few = ["workload.num_prompts=100", "engine.name=vllm"]
    (last,) = answers(
        Job(1, "demo", (*few, *overrides(knobs, {"gpu": "H100-80GB"}))), lambda: False
    )
    assert last["sizes"] == {"tokens": 8192, "seats": 1024}
    late = [*few, "engine.max_num_seqs=4", "workload.request_rate=20"]
    (last,) = answers(Job(2, "demo", tuple(late)), lambda: False)
    turns = [one["turn"] for one in last["advice"] if "turn" in one]
    assert any(
        {"seats", "replicas"} <= turn.keys() for turn in turns
    )  # which of them, a buyer says
    assert any(one.get("plan") for one in last["advice"])
    rules = {one["rule"] for one in last["advice"] if one.get("knob")}
    assert rules >= {"levels", "waiting"}  # by which the page puts each beside its chart


def test_a_server_that_would_not_start_is_told(recwarn) -> None:
    """Nothing stood out on the page; one that does not fit is an error."""
    keys = ("model=llama-3.1-8b", "gpu.name=L4", "workload.num_prompts=20", "engine.name=vllm")
    (last,) = answers(Job(1, "demo", keys), lambda: False)
    told = [one["text"] for one in last["advice"]]
    (start,) = [text for text in told if text.startswith("vLLM would not start here")]
    assert "estimated maximum model length is 33600" in start
    assert "it starts with engine.max_model_len=31904 or " in start
    assert "No finding: no knob needs turning." not in told
    with pytest.raises(HeadwayError, match="its log would say"):
        list(answers(Job(2, "demo", (*keys, "model=llama-3-70b")), lambda: False))


def test_knobs_say_what_the_scenario_says() -> None:
    """Also where it has no number, and where a name has arguments."""
    changed = ["cluster={replicas: 2, router: {router: prefix_aware}}", "goodput={}"]
    changed += ["workload.request_rate=.inf", "engine.scheduling_policy={policy: sjf, ageing: 1}"]
    knobs = {knob.name: knob for knob in knobs_of(load_scenario("demo", changed))}
    assert knobs["router"].value == "prefix_aware"
    assert knobs["policy"].value == "sjf"
    assert knobs["rate"].value == "all at once"
    assert (knobs["ttft"].value, knobs["tpot"].value) == ("none", "none")
    assert overrides([*knobs.values()], {"ttft": "none", "rate": 2}) == ["workload.request_rate=2"]


@pytest.mark.many
@pytest.mark.parametrize("name", [knob.name for knob in knobs_of(load_scenario("demo"))])
def test_every_knob_turned_to_an_end_runs_or_is_refused_in_words(name: str) -> None:
    knobs = knobs_of(load_scenario("demo"))
    (knob,) = [knob for knob in knobs if knob.name == name]
    settings = ["workload.num_prompts=20"]
    for value in (knob.values[0], knob.values[-1]):
        job = Job(1, "demo", (*settings, *overrides(knobs, {name: value})))
        with contextlib.suppress(HeadwayError):  # too large for the GPU, say
            (last,) = answers(job, lambda: False)
            assert last["requests"] == 20


def test_coarse_first_then_full_and_never_for_nobody() -> None:
    """A tenth of the requests, then all, as `headway run` has them; nothing once it is stale."""
    job = Job(1, "demo", ("workload.num_prompts=600",))
    first, last = answers(job, lambda: False)
    assert (first["coarse"], first["requests"], first["last"]) == (True, 60, False)
    assert (last["coarse"], last["requests"], last["last"]) == (False, 600, True)
    expected = run(load_scenario("demo", ["workload.num_prompts=600"])).summary()
    assert last["figures"]["mean_ttft_ms"] == expected["mean_ttft_ms"]
    hour = find_gpu("A100-80GB").dollars_per_hour
    price = hour / 3600 / expected["output_throughput"] * 1e6
    assert last["figures"]["dollars_per_million_output_tokens"] == pytest.approx(price)
    calls = iter([False, *[True] * 1000])
    with pytest.raises(Superseded):
        list(answers(job, lambda: next(calls)))


def test_what_is_asked_of_the_server(port: int) -> None:
    status, lines = ask(port, {"knobs": {"seats": 16}})
    assert status == 200
    assert [line["coarse"] for line in lines] == [True, False]
    assert lines[-1]["settings"] == ["workload.num_prompts=600", "engine.max_num_seqs=16"]
    status, lines = ask(port, {"knobs": {"gpu": "L4", "model": "llama-3-70b"}})
    assert status == 200
    assert lines[-1]["errors"]  # does not fit; the worker goes on
    for body, error in (
        (b"[", "the request is not JSON"),
        (b"[]", "the request is no mapping"),
        (b"[" * 30_000, "the request is not JSON"),
        (b" " * 70_000, "more than 65,536 bytes"),
        ({"trace": "../../etc/passwd"}, "trace: is not one that was uploaded"),
        ({"knobs": {"policy": "os:system"}}, "is not one of its values"),
        ({"knobs": []}, "knobs: is no mapping"),
        ({"knobs": None}, "knobs: is no mapping"),
    ):
        status, lines = ask(port, body)
        assert status == 400
        assert error in lines[0]["errors"][0]
    for headers in ({"Host": "example.org"}, {"Origin": "http://example.org"}):
        assert ask(port, {}, headers=headers)[0] == 403
    own = {"Host": f"LOCALHOST:{port}", "Origin": f"http://LocalHost:{port}"}
    assert ask(port, [], headers=own)[0] == 400  # names of hosts have no case


def test_what_is_no_http_is_answered_without_a_traceback(port: int) -> None:
    """`serving` sees that stderr stays empty."""
    assert [answer.split()[1] for answer in malformed(port)] == [b"400"] * 3


def test_the_newest_request_counts(port: int) -> None:
    """A run gives way to the next one, whose answer does not wait for it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/run", json.dumps({"knobs": {"rate": 0.1, "policy": "mlfq"}}))
    _, lines = ask(port, {"knobs": {}})
    assert lines[-1]["requests"] == 600
    old = [json.loads(line) for line in connection.getresponse().read().splitlines()]
    assert old[-1].get("cancelled") or old[-1]["last"]
    connection.close()


def test_the_command_refuses(tmp_path: Path, capsys) -> None:
    (tmp_path / "own.yaml").write_text("engine: {scheduling_policy: 'my_module:Policy'}\n")
    for words, error in (
        (["nowhere"], "nowhere"),
        (["demo", "--port", "70000"], "--port 70000: must be 0 to 65,535 ("),
        (["demo", "--set", "engine.max_num_seqs=0"], "engine.max_num_seqs"),
        ([str(tmp_path / "own.yaml")], "my_module:Policy"),
    ):
        assert main(["studio", *words]) == 2
        assert error in capsys.readouterr().err


def figure(driver, key: str, column: int = 1) -> str:
    cells = driver.find_elements("css selector", f"[data-key={key}] td")
    return str(cells[column - 1].text)


@pytest.mark.medium
def test_it_is_played_by_keyboard_alone(port: int) -> None:
    """Tab to a slider, move it: the number changes, the one before stays beside it; no errors."""
    from selenium.webdriver import ActionChains

    with browser() as driver:
        driver.get(f"http://127.0.0.1:{port}/")
        wait_for_runs(driver, 1)
        before = figure(driver, "mean_ttft_ms")
        keys = driver.switch_to.active_element
        for _ in range(60):  # not by element: a field for files would take the key for a path
            ActionChains(driver).send_keys(TAB).perform()
            keys = driver.switch_to.active_element
            if keys.get_attribute("id") == "knob-seats":
                break
        assert keys.get_attribute("id") == "knob-seats"
        outline = driver.execute_script(
            "return getComputedStyle(document.activeElement).outlineStyle"
        )
        assert outline != "none"
        for _ in range(12):
            keys.send_keys(LEFT)
        told = keys.get_attribute("aria-valuetext")
        wait_until_idle(driver)
        assert int(told) < 16
        assert figure(driver, "mean_ttft_ms") != before
        driver.find_element("id", "pin").send_keys(ENTER)
        keys.send_keys(HOME)
        wait_until_idle(driver)
        heads = driver.find_element("css selector", "#figures tr").text
        assert "now" in heads
        assert "before" in heads
        assert f"max_num_seqs {told}" in heads
        driver.find_element("id", "copy-cli").send_keys(ENTER)
        copied = driver.find_element("id", "copied")
        end = time.monotonic() + 10
        while not copied.get_attribute("data-text") and time.monotonic() < end:
            time.sleep(0.05)
        words = shlex.split(copied.get_attribute("data-text"))
        assert words[:3] == ["headway", "run", "demo"]
        assert words[3:] == [
            *("--set", "workload.num_prompts=600"),
            *("--set", "engine.max_num_seqs=1"),
        ]
        address = driver.current_url
        assert complaints(driver) == []
        driver.get("about:blank")
        driver.get(address)  # a link brings the knobs back
        wait_for_runs(driver, 1)
        slider = driver.find_element("id", "knob-seats")
        assert slider.get_attribute("aria-valuetext") == "1"


@pytest.mark.many
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [DESK, (640, 450), PHONE])
def test_it_can_be_read(port: int, size: tuple[int, int], dark: bool) -> None:
    """At 200 % (half the pixels) and on a phone nothing sticks out; contrasts are of level AA."""
    with browser(size, dark=dark) as driver:
        driver.get(f"http://127.0.0.1:{port}/#{quote(json.dumps({'seats': 63}))}")
        wait_for_runs(driver, 1)
        copied(driver, "copy-yaml", clipboard=False)  # what is shown only now and then
        assert not is_wider_than_window(driver)
        slider = driver.find_element("id", "knob-seats").rect
        assert slider["x"] + slider["width"] <= size[0]
        assert low_contrast(driver) == []
        for node in driver.find_elements("css selector", "input, select"):
            label = f"label[for='{node.get_attribute('id')}']"
            assert driver.find_elements("css selector", label) or node.get_attribute("aria-label")
        assert complaints(driver) == []
        window(driver, DESK)


@pytest.mark.medium
def test_a_link_that_is_wrong_says_what(port: int) -> None:
    """What is right in it is followed; a link pasted into the open page is followed, too."""
    with browser() as driver:
        for number, (hash_, error) in enumerate(
            (
                ("%7Bnonsense", "This link is damaged: the scenario is shown as it is"),
                ("[1]", "This link is damaged"),
                ("gpu=H999", "This link is not followed in full: GPU has no H999"),
                ("rate=abc&seats=4", "has no abc"),
                ('{"seats": 4, "sets": 1}', "not followed in full: there is no knob sets"),
                ('{"seats": 63}', ""),  # a number that is no stop of the knob can be typed
                ('{"seats": 4}', ""),
            ),
            1,
        ):
            driver.get(f"http://127.0.0.1:{port}/#{hash_ if '%' in hash_ else quote(hash_)}")
            wait_for_runs(driver, number)
            told = driver.find_element("id", "link-told").text
            assert error in told
            assert bool(error) == bool(told)
            seats = driver.find_element("id", "knob-seats").get_attribute("aria-valuetext")
            found = re.search(r'seats"?[:=] ?(\d+)', hash_)
            assert seats == (found.group(1) if found else "256")
        assert complaints(driver) == []


@pytest.mark.medium
def test_a_narrow_page_says_in_sight_of_the_knobs_what_came_of_one(port: int) -> None:
    with browser(PHONE) as driver:
        driver.get(f"http://127.0.0.1:{port}/")
        wait_for_runs(driver, 1)
        headline = driver.find_element("id", "headline")
        before = headline.text
        slider = driver.find_element("id", "knob-seats")
        slider.send_keys(HOME)
        told = wait_for_runs(driver, 2)
        wait_until_idle(driver)
        state, figures = headline.text.splitlines()
        assert state == told
        assert figures not in before
        assert figures.startswith(f"{figure(driver, 'output_throughput')} tokens/s · P99 TTFT ")
        script = "return arguments[0].getBoundingClientRect().toJSON()"
        above, below = (driver.execute_script(script, one) for one in (slider, headline))
        assert 0 <= above["top"] < above["bottom"] <= below["top"] < below["bottom"] <= PHONE[1]
        headline.send_keys(ENTER)  # leads to the results
        assert driver.execute_script(script, driver.find_element("id", "status"))["top"] < 100
        assert complaints(driver) == []
        window(driver, DESK)
        assert not headline.is_displayed()


@pytest.mark.medium
def test_an_error_names_the_knob_and_what_would_do(port: int) -> None:
    """It named a line of demo.yaml, which nobody had chosen; a press turns what would fit."""
    with browser() as driver:
        driver.get(f"http://127.0.0.1:{port}/#model=llama-3.1-70b")
        wait_until_idle(driver)
        errors = driver.find_element("id", "errors")
        assert errors.text.startswith("GPU: llama-3.1-70b in bfloat16 does not fit the A100-80GB")
        assert ".yaml" not in errors.text
        button = errors.find_element("tag name", "button")
        assert button.text == "Turn GPUs of a replica to 4"
        assert "or GPUs of a replica 4" in errors.text
        button.send_keys(ENTER)
        assert wait_for_runs(driver, 1).startswith("600 requests")
        assert errors.text == ""


@pytest.mark.medium
def test_a_typed_number_that_cannot_be_is_told(port: int) -> None:
    """The number before it came back without a word."""
    with browser() as driver:
        driver.get(f"http://127.0.0.1:{port}/")
        wait_for_runs(driver, 1)
        row = driver.find_element("id", "knob-seats").find_element("xpath", "..")
        field = row.find_element("class name", "typed")
        note = row.find_element("class name", "wrong")
        for text in ("-5", "abc", "63.5"):
            field.send_keys(ALL_OF_IT, text, ENTER)
            told = f"{text} is not a whole number from 1 to 1,024: it stays 256"
            assert (note.text, field.get_attribute("value")) == (told, "256")
        assert low_contrast(driver) == []
        field.send_keys(ALL_OF_IT, "63", ENTER)
        wait_for_runs(driver, 2)
        assert (note.text, field.get_attribute("value")) == ("", "63")
