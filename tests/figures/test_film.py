"""Films of batching: every step and every reason by hand, and what is written of them."""

import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from PIL import Image

from simulator import load_scenario, run
from simulator.cli.main import main
from simulator.figures import film
from simulator.views.html.film_page import film_page
from tests.support.browser import browser, complaints, low_contrast

SCENARIO = """
name: film
model: llama-3-8b
gpu: {name: A100-80GB}
engine:
  name: textbook
  scheduling_policy: fcfs
  max_num_seqs: 2
  max_num_batched_tokens: 100
  block_size: 16
  max_model_len: 128
  enable_prefix_caching: false
cost: {kind: linear, base: 1.0, per_token: 0, per_context: 0}
workload: {num_prompts: 3, request_rate: inf, input_len: 32, output_len: 4}
"""


@pytest.fixture
def scenario(tmp_path: Path):
    """Make the scenario above, with settings."""
    path = tmp_path / "film.yaml"
    path.write_text(SCENARIO, "utf-8")
    return lambda *settings: load_scenario(path, list(settings))


def test_each_step_by_hand(scenario) -> None:
    """Two prompts in the first second, three tokens more of each, then the third request."""
    found = film.record("x", scenario())
    assert [(frame.start, frame.end) for frame in found.frames] == [(k, k + 1) for k in range(8)]
    seats = [frame.seats for frame in found.frames]
    assert seats[0] == [(0, 0, "prefill", 32), (1, 1, "prefill", 32)]
    assert seats[1] == [(0, 0, "decode", 2), (1, 1, "decode", 2)]
    assert seats[3] == [(0, 0, "decode", 4), (1, 1, "decode", 4)]
    assert seats[4] == [(0, 2, "prefill", 32)]
    assert [frame.waiting for frame in found.frames] == [[2]] * 4 + [[]] * 4
    assert [frame.why for frame in found.frames[:5]] == ["2 waits: all 2 seats are taken"] * 4 + [
        ""
    ]
    assert [frame.events for frame in found.frames[3:6]] == [[], ["done: 0, 1", "admitted: 2"], []]
    assert found.frames[0].blocks == {0: 2, 1: 2}
    assert found.frames[1].blocks == {0: 3, 1: 3}
    assert found.blocks - found.frames[1].free == 6
    assert found.at(4.5) is found.frames[4]
    assert found.at(-1.0) is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["engine.max_num_batched_tokens=32"], "1 waits: the step's 32 tokens are spent"),
        (
            ["engine.scheduling_policy={policy: static, batch_size: 2}"],
            "2 waits: nobody boards until the whole batch is done",
        ),
    ],
)
def test_why_one_waits(scenario, settings: list[str], why: str) -> None:
    whys = [frame.why for frame in film.record("x", scenario(*settings)).frames]
    assert whys[0].startswith(why)


def test_blocks_that_lack_are_counted(scenario) -> None:
    """Of 5 blocks two prompts take 2 each; a third needs 2 and finds 1."""
    small = scenario(
        "engine.num_gpu_blocks_override=6",
        "engine.max_num_seqs=3",
        "engine.max_model_len=64",
        "engine.max_num_batched_tokens=200",
    )
    first, second, *_ = film.record("x", small).frames
    assert first.why == "2 waits: 1 blocks short"
    assert second.events == ["preempted: 1"]
    assert second.why == "1 waits: blocks are short, a request was just preempted"


@pytest.mark.parametrize("policy", ["static", "fcfs", "sjf", "orca", "sarathi", "sglang", "tgi"])
def test_looking_changes_nothing(policy: str) -> None:
    """As many steps, ending when they end without a film, whoever schedules."""
    settings = [
        f"engine.scheduling_policy={policy}",
        *("engine.max_num_seqs=8", "engine.max_model_len=6000", "workload.num_prompts=40"),
    ]
    scenario = load_scenario("demo", settings)
    found = film.record("x", scenario, 40)
    result = run(scenario, stepwise=True)
    assert found.end == result.logs[0].steps["end"][-1]
    assert len(found.frames) == len(result.logs[0].steps)
    for frame in found.frames:
        assert len({seat for seat, *_ in frame.seats}) == len(frame.seats) <= 8


def test_a_film_of_stages_is_of_the_same_run() -> None:
    scenario = load_scenario("demo", ["engine.pipeline_parallel_size=2", "workload.num_prompts=12"])
    found, log = film.record("x", scenario), run(scenario).logs[0]
    assert len(found.frames) == len(log.steps)
    assert [frame.end for frame in found.frames] == log.steps["end"].tolist()


@pytest.mark.medium
def test_pictures_that_move(scenario) -> None:
    films = [film.record("a<b", scenario()), film.record("c", scenario("engine.max_num_seqs=1"))]
    text = film.svg(films)
    root = ET.fromstring(text)
    assert "a<b" in {node.text for node in root.iter("{http://www.w3.org/2000/svg}text")}
    for node in root.iter("{http://www.w3.org/2000/svg}animate"):
        times = [float(time) for time in node.attrib["keyTimes"].split(";")]
        assert times[0] == 0
        assert times == sorted(times)
        assert len(times) == len(node.attrib["values"].split(";"))
    assert film.svg(films) == text
    image = Image.open(io.BytesIO(film.gif(films)))
    assert image.n_frames == film.SHOTS
    assert image.size == film.size_of(films)
    wait = [shape[-1] for shape in film.shots(films)[1] if shape[0] == "text"]
    assert "1 waits: all 1 seats are taken" in wait


@pytest.mark.medium
def test_the_page_is_played_with_keys(scenario, tmp_path: Path) -> None:
    films = [film.record("one", scenario()), film.record("two", scenario("engine.max_num_seqs=1"))]
    path = tmp_path / "film.html"
    path.write_text(film_page(films), "utf-8")
    with browser() as driver:
        driver.get(path.as_uri())
        player = driver.find_element("id", "player")
        step = driver.find_element("css selector", "[aria-label='A step on']")
        assert "prefill 32 of 32 tokens" in player.text
        assert low_contrast(driver) == []
        step.send_keys("\ue007")  # Enter
        assert "decode: token 2 of 4" in player.text
        assert "1 waits: all 1 seats are taken" in player.text
        slider = driver.find_element("css selector", "[aria-label=Step]")
        slider.send_keys("\ue010")  # End
        assert player.get_attribute("data-place") == "11"
        play = driver.find_element("css selector", "[aria-label='Play or pause']")
        play.send_keys(" ")
        for _ in range(1000):
            if "two: all done" in player.text:
                break
        assert "two: all done" in player.text
        assert play.text == "Play"
        assert complaints(driver) == []


def test_the_command_and_what_it_refuses(scenario, tmp_path: Path, capsys) -> None:
    path, out = tmp_path / "film.yaml", tmp_path / "run"
    scenario()
    assert main(["run", str(path), "--out", str(out), "--quiet"]) == 0
    assert main(["plot", "film", str(out), "--requests", "2"]) == 0
    data = re.search(r"getElementById\('player'\), (\[.*?\])\);", (out / "film.html").read_text())
    assert len(json.loads(data.group(1))[0]["prompts"]) == 2  # type: ignore[union-attr]
    for extra, error in (
        (["--out", str(tmp_path / "x.png")], "x.png: must end in .html, .svg or .gif"),
        (["--requests", "0"], "a film is of 1 to 200 requests, not 0"),
    ):
        assert main(["plot", "film", str(out), *extra]) == 2
        assert error in capsys.readouterr().err
    clustered = ["--set", "cluster={replicas: 2}", "--out", str(tmp_path / "c"), "--quiet"]
    assert main(["run", str(path), *clustered]) == 0
    assert main(["plot", "film", str(tmp_path / "c")]) == 2
    assert "cluster: a film shows one engine" in capsys.readouterr().err
    assert not (tmp_path / "c" / "film.html").exists()


def test_no_two_requests_that_are_seen_together_have_one_colour() -> None:
    """Neither in the picture nor in the page, whose player counts hues in the same steps."""
    seen = film.MOST_SEATS + film.MOST_WAITING  # at most, and one after another
    assert len({film._hue_of(request) for request in range(seen)}) == seen
    player = (Path(film.__file__).parents[1] / "views/html/assets/player.js").read_text("utf-8")
    assert f"(id * {film.GOLDEN_ANGLE}) % 360}} 45% ${{(id >> 3) & 1 ? 20 : 31}}%" in player
