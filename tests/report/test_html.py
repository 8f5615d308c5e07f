"""The HTML report: its numbers by hand, its folders, and the page in a real browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from headway.cli.main import main
from headway.figures.data import Run, read_runs
from headway.report.html.charts import distributions, over_time, seats
from headway.report.html.page import page
from simulator.results.breakdown import PARTS
from tests.support.scenarios import SMALL

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
HOVER = """
const data = JSON.parse(document.getElementById('data').textContent);
const { seats: [bars], first: [low, high] } = data;
const times = bars.start.map((start, k) => start + bars.length[k] / 2);
const bar = times.findIndex((time, k) => bars.seat[k] === 0 && time > low && time < high);
const over = document.querySelector('.chart[data-kind=seats] .u-over');
const box = over.getBoundingClientRect();
const x = box.left + (box.width * (times[bar] - low)) / (high - low);
over.dispatchEvent(new MouseEvent('mouseenter', {}));
over.dispatchEvent(new MouseEvent('mousemove', { clientX: x, clientY: box.bottom - 3 }));
setTimeout(() => { document.title = over.querySelector('.tip').textContent; }, 100);
document.body.dataset.fits = document.documentElement.scrollWidth <= window.innerWidth;
"""


def tiny(requests: list[dict], steps: list[dict], **engine: object) -> Run:
    """A run by hand; what is not said is 0."""
    columns = ("arrival", "client_queue_time", "queue_time", "preemptions", "replica")
    zero = dict.fromkeys((*columns, "prompt_tokens", "output_tokens", *PARTS), 0)
    rows = [
        zero | {"id": k, "tpot": np.nan, "finish_reason": "stop"} | r
        for k, r in enumerate(requests)
    ]
    names = ("running", "waiting", "prefill_tokens", "decode_tokens", "wasted_tokens", "preempted")
    blank = dict.fromkeys((*names, "kv_blocks_used"), 0) | {"steps": 1, "kv_blocks_free": 10}
    frames = pd.DataFrame(rows), pd.DataFrame([blank | step for step in steps])
    summary = {"headway": {}, "completed": len(rows), "duration": 1.0}
    return Run("<b>&", summary, {"engine": {"block_size": 2} | engine}, *frames)


def test_the_groups_of_a_cluster_are_named_and_compared(tmp_path: Path) -> None:
    big = "big: {gpu: {name: H100-80GB, count: 2}, engine: {tensor_parallel_size: 2}}"
    path, out = tmp_path / "s.yaml", tmp_path / "out"
    path.write_text(SMALL + f"cluster: {{groups: {{small: {{replicas: 3}}, {big}}}}}\n")
    assert main(["run", str(path), "--out", str(out), "--quiet"]) == 0
    (run,) = read_runs([out])
    text = page([run])
    assert "small 3 A100-80GB, big 2 H100-80GB" in text
    rows = re.findall(r"<tr><th>(small|big)</th><td>(\d)</td><td>(\d)</td><td>(\S+?)</td>", text)
    assert rows == [("small", "3", "3", "A100-80GB"), ("big", "1", "2", "H100-80GB")]
    run.summary["headway"]["cluster"]["groups"]["big"] = "?"
    assert "H100-80GB</td>" not in page([run])  # damaged: what is left is one group


def test_each_groups_cost_model_is_shown_once(tmp_path: Path) -> None:
    path, out = tmp_path / "s.yaml", tmp_path / "out"
    toy = "toy: {cost: {kind: linear, base: 0.25, per_token: 0, per_context: 0}}"
    groups = f"a: {{}}, new: {{gpu: {{name: H100-80GB}}}}, {toy}, b: {{}}"
    path.write_text(f"workload: {{num_prompts: 4}}\ncluster: {{groups: {{{groups}}}}}\n")
    assert main(["run", str(path), "--out", str(out), "--quiet"]) == 0
    (run,) = read_runs([out])
    text = page([run]).partition(">Cost model</h2>")[2]
    assert re.findall(r"<h3>(.*?)</h3>", text) == [
        "llama-3-8b.a100.bf16 <small>a, b</small>",
        "llama-3-8b.h100.bf16 <small>new</small>",
        "linear <small>toy</small>",
    ]
    assert re.findall(r"gpu (\S+), tensor parallel", text) == ["A100-80GB", "H100-80GB"]
    assert "<p>kind linear, base 0.25, per token 0, per context 0</p>" in text
    path.write_text("workload: {num_prompts: 4}\n")
    assert main(["run", str(path), "--out", str(tmp_path / "one"), "--quiet"]) == 0
    one = read_runs([tmp_path / "one"])
    assert "<h3>llama-3-8b.a100.bf16</h3><p>95 % of steps within -" in page(one)
    text = page([*one, run]).partition(">Cost model</h2>")[2]
    assert re.findall(r"<h3>\S+ <small>(.*?)</small>", text)[0] == (
        '<span class="dot run-0"></span>one, <span class="dot run-1"></span>out: a, '
        '<span class="dot run-1"></span>out: b'
    )


def test_servers_are_counted_and_not_their_ranks(tmp_path: Path) -> None:
    path, out = tmp_path / "s.yaml", tmp_path / "out"
    path.write_text(SMALL + "gpu: {count: 2}\ncluster: {replicas: 3}\n")
    ranks = ["--set", "engine.data_parallel_size=2"]
    assert main(["run", str(path), *ranks, "--out", str(out), "--quiet"]) == 0
    assert "3 replicas of 2 x A100-80GB" in page(read_runs([out]))


def test_over_time_by_hand() -> None:
    """A prefill of 1 s, then 4 decode steps of 2 requests in 2 s with a block each step.

    Bins of 1 s. A third request comes at 1.5 s and waits.
    """
    requests = [{"ttft": 1.0, "e2el": 3.0}, {"ttft": 1.0, "e2el": 3.0}]
    requests.append({"arrival": 1.5, "ttft": np.nan, "e2el": np.nan, "finish_reason": "unfinished"})
    steps = [
        {"start": 0.0, "duration": 1.0, "running": 2, "prefill_tokens": 8, "kv_blocks_used": 4},
        {"start": 1.0, "duration": 2.0, "steps": 4, "running": 2, "decode_tokens": 2}
        | {"kv_blocks_used": 4, "kv_blocks_free": 6, "preempted": 1},
    ]
    steps[0]["kv_blocks_free"] = 6
    found = over_time(tiny(requests, steps), np.arange(5.0))
    assert found["running"] == [2, 2, 2, 0]
    assert found["waiting"] == [0, 0.5, 1, 1]
    assert found["kv"] == [40, 55, 55, 0]  # 4 blocks, and 1.5 steps of one block each
    assert found["tokens"] == [0, 6, 4, 0]  # the first tokens come at 1 s
    assert found["itl"] == [None, 500, 500, None]
    assert found["preempted"] == [None, 1, None, None]
    fixed = over_time(tiny(requests, steps, allocation="contiguous"), np.arange(5.0))
    assert fixed["kv"] == [40, 40, 40, 0]


def test_distribution_by_hand() -> None:
    runs = [tiny([{"ttft": t, "e2el": 1.0} for t in (0.1, 0.2, 0.2, 0.4)], [])]
    found = distributions(runs, "ttft")
    share = dict(zip(found["ms"], found["percent"][0], strict=True))
    assert found["ms"][0] < 100
    assert found["ms"][-1] > 400
    assert [max(p for ms, p in share.items() if ms < limit) for limit in (99, 150, 390, 500)] == [
        *(0, 25, 75, 100)
    ]
    assert distributions(runs, "tpot") == {"ms": [], "percent": [[]]}


def test_seats_by_hand() -> None:
    """The lowest free seat is taken; a replica's seats lie above those of the one before."""
    requests = [
        {"ttft": 1.0, "e2el": 5.0},
        {"ttft": 1.0, "e2el": 2.0},
        {"arrival": 1.0, "queue_time": 1.0, "ttft": 2.0, "e2el": 3.0},
        {"ttft": 1.0, "e2el": 2.0, "replica": 1},
        {"arrival": 5.5, "ttft": 1.0, "e2el": 2.0},
        {"ttft": np.nan, "e2el": np.nan, "queue_time": np.nan, "finish_reason": "rejected"},
    ]
    found = seats(tiny(requests, []), 0.0, 5.0)
    assert [found[key] for key in ("id", "seat", "start", "prefill", "length")] == [
        [0, 1, 2, 3],
        [0, 1, 1, 2],
        [0, 0, 2, 0],
        [1, 1, 1, 1],
        [5, 2, 2, 2],
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A comparison of two runs that preempt, and beside it a run in Parquet."""
    top = tmp_path_factory.mktemp("runs")
    (top / "s.yaml").write_text(SMALL.replace("input_len", "clients: 2, input_len"))
    blocks = ["--set", "engine.num_gpu_blocks_override=40", "--set", "engine.max_model_len=200"]
    vary = ["--vary", "engine.scheduling_policy=static,fcfs", "--out", str(top / "both")]
    assert main(["compare", str(top / "s.yaml"), *blocks, *vary, "--quiet"]) == 0
    for form in ("csv", "parquet"):
        out = ["--out", str(top / form), "--format", form, "--quiet"]
        assert main(["run", str(top / "s.yaml"), *out]) == 0
    return top


@pytest.mark.medium
def test_tokens_over_time_add_up(folder: Path) -> None:
    """Both tables agree with the summary, and CSV with Parquet."""
    for run in read_runs([folder / "both"]):
        end = float((run.steps["start"] + run.steps["duration"]).max()) + 0.01
        edges = np.linspace(0, end, 64)
        found = over_time(run, edges)
        tokens = sum(found["tokens"]) * (edges[1] - edges[0])  # type: ignore[arg-type]
        assert tokens == pytest.approx(run.summary["total_output_tokens"], rel=2e-3)
    plain = read_runs([folder / "csv"])[0]
    assert max(seats(plain, 0.0, 9e9)["seat"]) == plain.summary["headway"]["max_running"] - 1
    pages = [page(read_runs([folder / form])) for form in ("csv", "parquet")]
    one, two = (re.findall(r"<section>.*?</section>", text, re.S) for text in pages)
    assert [a.replace("parquet", "csv") for a in two] == one


@pytest.mark.medium
def test_the_page_needs_no_network(folder: Path, tmp_path: Path, capsys) -> None:
    """A comparison's folder stands for its runs, which are told apart by name."""
    out = tmp_path / "page.html"
    assert main(["report", str(folder / "both"), "--out", str(out)]) == 0
    assert re.search(r"written to .*: static, fcfs; 0\.\d MB", capsys.readouterr().out)
    text = out.read_text("utf-8")
    assert not re.search(
        r"src\s*=|href\s*=(?!\"#)|@import|url\(|fetch\(|XMLHttpRequest|importScripts", text
    )
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S).group(1))  # type: ignore[union-attr]
    assert data["labels"] == ["static", "fcfs"]
    assert len(data["seats"][0]["id"]) == 40
    for words in ("engine.scheduling_policy", "Clients", "Output throughput", "client-1"):
        assert words in text
    escaped = page([tiny([{"ttft": 1.0, "e2el": 2.0}], [{"start": 0.0, "duration": 1.0}])])
    assert "<b>&" not in escaped.replace("\\u003cb>&", "")


def test_every_colour_that_is_used_is_there(folder: Path, tmp_path: Path) -> None:
    """A canvas says nothing of one that is not, and goes on with the last."""
    assert main(["report", str(folder), "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text("utf-8")
    used = set(re.findall(r"""(?:var\(|css\(")(--[a-z]+(?:-[a-z]+)*)[")\s,]""", text))
    assert {"--bad", "--paper", "--ink"} <= used
    assert used <= set(re.findall(r"(--[a-z0-9-]+):", text))


@pytest.mark.medium
def test_a_large_run_makes_a_small_page() -> None:
    """100,000 requests and 400,000 rows of steps."""
    random = np.random.default_rng(0)
    times = np.sort(random.uniform(0, 7000, 100_000))
    requests = pd.DataFrame({"id": np.arange(100_000), "arrival": times, "finish_reason": "stop"})
    for name in ("client_queue_time", "prompt_tokens", "preemptions", "replica", *PARTS):
        requests[name] = 0
    requests["queue_time"], requests["output_tokens"] = 0.0, 100
    requests["ttft"] = random.exponential(0.2, 100_000)
    requests["tpot"], requests["e2el"] = 0.02, requests["ttft"] + random.exponential(5, 100_000)
    starts = np.linspace(0, 7000, 400_000)
    steps = pd.DataFrame({"start": starts, "duration": 0.017, "steps": 1})
    for name in ("running", "waiting", "decode_tokens", "wasted_tokens", "kv_blocks_used"):
        steps[name] = random.integers(0, 300, len(starts))
    steps["kv_blocks_free"], steps["preempted"], steps["prefill_tokens"] = 1000, 1, 0
    run = tiny([], [])
    run.requests, run.steps = requests, steps
    assert len(page([run] * 8)) < 5e6


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (shutil.rmtree, "{}: no such folder; `headway run`"),
        (lambda f: (f / "summary.json").unlink(), "{}/summary.json: no such file"),
        (lambda f: (f / "summary.json").write_text("{"), "{}/summary.json: damaged: Expecting"),
        (lambda f: (f / "summary.json").write_text("{}"), "{}/summary.json: has no key headway"),
        (lambda f: (f / "scenario.yaml").write_text("a: ["), "{}/scenario.yaml: damaged: it is no"),
        (lambda f: (f / "steps.csv").unlink(), "{}/steps.csv: no such file"),
        (lambda f: (f / "steps.csv").write_text("a,b\n1,2,3\n4\n"), "{}/steps.csv: has no column"),
        (lambda f: (f / "requests.csv").write_bytes(b"\xff\xfe\x00"), "{}/requests.csv: damaged"),
        (
            lambda f: (f / "steps.csv").write_text(
                (f / "steps.csv").read_text().replace(",8,", ",many,", 1)
            ),
            "{}/steps.csv: damaged: ",
        ),
    ],
)
def test_damaged_folders(folder: Path, tmp_path: Path, capsys, damage, error: str) -> None:
    """One line that names the file, and nothing is written."""
    copy, out = tmp_path / "run", tmp_path / "page.html"
    shutil.copytree(folder / "both" / "fcfs", copy)
    damage(copy)
    assert main(["report", str(copy), "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("headway: error: " + error.format(copy))
    assert told.count("\n") == 1
    assert not out.exists()


def test_too_many_runs_and_none(folder: Path, tmp_path: Path, capsys) -> None:
    for k in range(9):
        shutil.copytree(folder / "csv", tmp_path / str(k))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "x.html")]) == 2
    assert "9 runs are too many for one page, which has 8" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert main(["report", str(folder / "csv"), str(folder / "csv")]) == 2
    assert "is given twice" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_run_without_steps(folder: Path, tmp_path: Path, form: str) -> None:
    """All requests are rejected: the run ends with 1, and its page has nothing to draw."""
    out = ["--out", str(tmp_path / "run"), "--format", form, "--quiet"]
    assert main(["run", str(folder / "s.yaml"), "--set", "engine.max_model_len=20", *out]) == 1
    (run,) = read_runs([tmp_path / "run"])
    assert seats(run, 0.0, 1.0)["id"] == []
    assert "Warning: all 40 requests were rejected" in page([run])


@pytest.mark.medium
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("view", ["--window-size=1280,900", "--window-size=390,800"])
def test_in_a_browser(folder: Path, tmp_path: Path, view: str) -> None:
    """Every chart is drawn, no script fails, and pointing at a bar tells which request it is.

    Nothing is wider than the window, on a desk or on a phone.
    """
    text = page(read_runs([folder / "both"]))
    out = tmp_path / "page.html"
    out.write_text(text.replace("</body>", f"<script>{HOVER}</script></body>"), "utf-8")
    flags = [*QUIET, view, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000"]
    command = [str(CHROMIUM), *flags, "--dump-dom", out.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    body = re.search(r"<body[^>]*>", shown).group()  # type: ignore[union-attr]
    assert "data-error" not in body
    assert 'data-fits="true"' in body
    assert f'data-charts="{text.count("class=" + chr(34) + "chart")}"' in body
    assert shown.count("<canvas") == 1 + 2 + 7 + 3  # the first is the verdict's
    assert re.search(r"<title>request \d+, seat 0\n64 \+ 8 tokens", shown)


@pytest.mark.parametrize("name", ["x.pdf", "x.png", "x"])
def test_a_page_is_html_and_nothing_else(tmp_path: Path, capsys, name: str) -> None:
    """A name that promises another format is refused before anything is read."""
    assert main(["report", str(tmp_path), "--out", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err == (
        f"headway: error: --out {tmp_path / name}: must end in .html or .htm\n"
    )
    assert not (tmp_path / name).exists()


def test_a_page_opens_with_the_verdict_and_what_to_do(tmp_path: Path) -> None:
    """In a line; of several runs the winner. The table of all metrics is folded."""
    path = tmp_path / "s.yaml"
    path.write_text(SMALL)
    for name, most in (("one", 1), ("many", 64)):
        words = ["--set", f"engine.max_num_seqs={most}", "--set", "goodput={ttft: 500}"]
        assert main(["run", str(path), *words, "--out", str(tmp_path / name), "--quiet"]) == 0
    one, many = read_runs([tmp_path / "one", tmp_path / "many"])
    first = page([one]).partition('<h2 id="verdict">')[2].partition("</section>")[0]
    assert first.startswith("Verdict</h2><p class=verdict>Service level missed: goodput&gt;=0.99")
    assert "What to do: <span class=knob>raise engine.max_num_seqs" in first
    assert 'data-kind="cdf" data-key="ttft"' in first
    both = page([one, many])
    told = both.partition("<p class=verdict>")[2]
    assert told.startswith("Winner: many: the only one that keeps the service levels.</p>")
    assert both.index("<summary>All metrics</summary>") < both.index("Mean KV cache usage")
