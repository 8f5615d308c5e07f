"""Runs that keep no requests: the summary is that of the run that keeps them all."""

import json
from itertools import chain
from math import isclose
from pathlib import Path

import numpy as np
import pytest

from headway.cli.main import main
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.scenario.scenario import Scenario
from simulator.simulation import stream
from simulator.simulation.run import run
from simulator.simulation.stream import chunks, run_streamed
from simulator.util.errors import HeadwayError
from simulator.util.quantile_sketch import RELATIVE_ERROR
from simulator.workload.workload import COLUMNS
from tests.support.scenarios import SMALL

PERCENTILES = ("median_", "p90_", "p95_", "p99_", "p99.9_")
FAIRNESS = ("fairness_windows", "contended_share", "jain_index", "service_difference")
NOT_TOLD = ("diagnosis", "suggested_warmup_s", "percentile_error")
FLEET = "cluster={replicas: 3, router: least_outstanding"
LENGTHS = ["workload.input_len={kind: uniform, low: 1, high: 300}", "workload.output_len=9"]
TIGHT = "engine.num_gpu_blocks_override=24"
CASES = {
    "one engine": [],
    "mixed lengths": LENGTHS,
    "preemption": [TIGHT, "workload.output_len={kind: uniform, low: 1, high: 90}"],
    "swap": [TIGHT, "workload.output_len=60", "engine.preemption_mode=swap"],
    "swing": ["workload.diurnal={period: 5, amplitude: 1}"],
    "all at once": ["workload.request_rate=inf"],
    "closed loop": ["workload.max_concurrency=5", "workload.request_rate=inf"],
    "closed loop with a rate": ["workload.max_concurrency=5"],
    "frontend": ["workload.frontend={latency: 10, per_request: 20, per_token: 1}"],
    "some rejected": ["engine.max_model_len=200", *LENGTHS],
    "static": ["engine.scheduling_policy=static"],
    "answers at once": ["engine.scheduling_policy={policy: static, deliver: batch}", *LENGTHS],
    "async": ["engine.async_scheduling=true"],
    "drafts": ["engine.speculative_config={num_speculative_tokens: 2, acceptance: 0.6}"],
    "prefixes": ["workload.prefix_len=48", "engine.enable_prefix_caching=true"],
    "prefix groups": [
        "workload.prefix_groups={num_prefixes: 3}",
        "engine.enable_prefix_caching=true",
        "engine.kv_offloading_size=1",
        TIGHT,
    ],
    "sessions": ["workload.sessions={turns: 4, think_time: 0.2}", *LENGTHS],
    "long sessions": [
        "workload.sessions={turns: {kind: uniform, low: 30, high: 90}, think_time: 0}",
        "workload.input_len=3",
        "workload.output_len=9",
        "engine.enable_prefix_caching=true",
        TIGHT,
    ],
    "sessions in a closed loop": [
        "workload.sessions={turns: {kind: uniform, low: 1, high: 5}, think_time: 0.1}",
        "workload.max_concurrency=5",
        *LENGTHS,
    ],
    "sessions of clients to a fleet": [
        "workload.sessions={turns: {kind: uniform, low: 1, high: 9}, think_time: 0.5}",
        "workload.clients=3",
        "workload.prefix_groups={num_prefixes: 3, zipf: 1}",
        "engine.enable_prefix_caching=true",
        "cluster={replicas: 3, router: session_affinity}",
    ],
    "clients": ["workload.clients=3", "engine.scheduling_policy=fair", *LENGTHS],
    "clients of two priorities": [
        "workload={clients: 3, priorities: [0, 10, 9], request_rate: 40, output_len: 5}",
        "engine={scheduling_policy: priority, max_num_seqs: 4}",
        "goodput={ttft: 50}",
    ],
    "images": [
        "engine={name: vllm, multimodal_config: {encoder_seconds: [[1, 0.01], [99, 0.02]]}}",
        "workload.multimodal={image: {tokens: 20, distinct: 9}}",
    ],
    "fleet": [FLEET + "}", *LENGTHS],
    "replicas in turn": ["cluster={replicas: 3, router: round_robin}", *LENGTHS, TIGHT],
    "pods behind a frontend": [
        "cluster={replicas: 4, pods: 2, router: random, pod_router: least_outstanding}",
        "workload.frontend=client",
        *LENGTHS,
    ],
    "groups": [
        "cluster={router: least_tokens, groups: {a: {replicas: 2}, b: {engine: {max_num_seqs: 2}}}}"
    ],
    "clients that give up": [
        FLEET + ", client: {timeout: 0.4, max_retries: 1}, admission: {max_outstanding: 9}}",
        "workload.request_rate=150",
    ],
    "failures": [FLEET + ", failures: {mtbf: 2, mttr: 0.5}}", TIGHT],
    "autoscaling": [
        FLEET + ", autoscaling: {metric: slo_attainment, target: 0.9, interval: 0.3, "
        "cooldown: 0.5, startup_delay: 0.1, max_replicas: 5}}",
        "workload.request_rate=150",
        "goodput={ttft: 50}",
    ],
}


def scenario(folder: Path, *overrides: str) -> Scenario:
    path = folder / "s.yaml"
    path.write_text(SMALL)
    return load_scenario(path, ["workload.num_prompts=300", *overrides])


def flat(values: dict, name: str = "") -> dict[str, object]:
    """Return all values by dotted key."""
    found: dict[str, object] = {}
    for key, value in values.items():
        inner = flat(value, f"{name}{key}.") if isinstance(value, dict) else {name + key: value}
        found |= inner
    return found


@pytest.mark.many
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_the_summary_is_that_of_a_run_that_keeps_its_requests(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "CHUNK", 32)
    monkeypatch.setattr(stream, "PER_REPLICA", 8)
    monkeypatch.setattr("simulator.engine.drive.EVENTS_PER_LOOK", 7)
    monkeypatch.setattr("simulator.simulation.stream.REQUESTS_PER_TURN", 2)
    assert_as_kept(scenario(tmp_path, *CASES[case]))


def assert_as_kept(what: Scenario) -> None:
    """Compare a streamed run with one that keeps its requests."""
    kept = flat(run(what).summary())
    missing = tuple(f"headway.{name}" for name in FAIRNESS)
    kept = {key: value for key, value in kept.items() if not key.startswith(missing)}
    told = flat(run_streamed(what))
    assert kept.keys() - told.keys() == {k for k in kept if k.startswith("headway.diagnosis")} - {
        "headway.diagnosis"
    }
    for key, value in told.items():
        name = key.rpartition(".")[2]
        if name in NOT_TOLD or key == "headway.warnings":
            continue
        expected = kept[key]
        if isinstance(expected, float) and isinstance(value, float):
            sketched = key.startswith(PERCENTILES) or name.startswith(PERCENTILES)
            error = RELATIVE_ERROR * 1.001 if sketched else 1e-9
            assert isclose(value, expected, rel_tol=error, abs_tol=1e-9), (key, value, expected)
        else:
            assert value == expected, key
    assert told["completed"]


def test_nothing_is_packed_that_is_still_to_be_measured(tmp_path: Path, monkeypatch) -> None:
    """All end after the last has come: where a page has 8 rows, all but some would be packed."""
    monkeypatch.setattr("simulator.core.log.PAGE", 8)
    monkeypatch.setattr("simulator.core.packed.PAGE", 8)
    burst = ("workload.request_rate=inf", "workload.num_prompts=60")
    assert_as_kept(scenario(tmp_path, *burst, "cluster={replicas: 1, router: round_robin}"))


def test_chunks_are_cut_from_the_same_numbers(tmp_path: Path) -> None:
    groups = "workload.prefix_groups={num_prefixes: 3}"
    turns = "workload.sessions={turns: {kind: uniform, low: 1, high: 90}, think_time: 2}"
    clients = ["workload.clients=4", "workload.priorities=[1, 2, 3, 4]", "workload.max_tokens=9"]
    for overrides in ([], LENGTHS, [groups], [groups, turns, *LENGTHS], [turns, *clients]):
        what = scenario(tmp_path, *overrides)
        whole = make_workload(what)
        total, parts, _ = chunks(what, 64)
        found = list(parts)
        assert (total, len(found)) == (300, 5)
        for name in COLUMNS:
            if (expected := getattr(whole, name)) is None:
                assert all(getattr(part, name) is None for part in found)
            elif isinstance(expected, list):
                assert [*chain(*(getattr(part, name) for part in found))] == expected
            else:
                together = np.concatenate([getattr(part, name) for part in found])
                assert np.array_equal(together, expected, equal_nan=together.dtype.kind == "f")


SESSIONS = "workload={sessions: {turns: 4, think_time: 0.2}, request_rate: 5, output_len: 3}"


@pytest.mark.parametrize("load", ["workload.request_rate=20", SESSIONS])
def test_what_is_kept_does_not_grow_with_the_requests(
    load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "CHUNK", 32)
    monkeypatch.setattr("simulator.engine.drive.EVENTS_PER_LOOK", 64)
    measure = stream.StreamedRun._measure
    sizes: list[int] = []

    def look(self: stream.StreamedRun, *args: object, **options: object) -> None:
        log = self.logs[0]
        rows = (log.step_rows, log.request_rows, log.run_rows, log.tick_ends, log.joined)
        turns = self.client._turns
        waiting = 0 if turns is None else len(turns._next) + len(turns._first)
        held = 99 * (len(self.client.chunks) + waiting + len(self.metrics._later))
        sizes.append(sum(map(len, rows)) + held)
        measure(self, *args, **options)

    monkeypatch.setattr(stream.StreamedRun, "_measure", look)
    most = {}
    for count in (500, 5000):
        sizes.clear()
        run_streamed(scenario(tmp_path, load, f"workload.num_prompts={count}"))
        most[count] = max(sizes)
    assert most[5000] < 1.5 * most[500]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("predictor={kind: oracle}", "predictor: its errors"),
    ],
)
def test_what_needs_all_requests_is_refused_by_its_key(
    override: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(HeadwayError, match=f"^--no-tables: {why}"):
        run_streamed(scenario(tmp_path, override))


@pytest.mark.medium
def test_more_requests_than_fit_are_only_streamed(tmp_path: Path) -> None:
    what = scenario(tmp_path, "workload.num_prompts=10000001")
    with pytest.raises(HeadwayError, match=r"num_prompts: 10000001 requests do not fit .*--no-tab"):
        make_workload(what)
    total, parts, _ = chunks(what, 100)
    assert total == 10_000_001
    assert len(next(parts)) == 100


def test_the_command_writes_the_summary_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "s.yaml", tmp_path / "out"
    path.write_text(SMALL)
    assert main(["run", str(path), "--no-tables", "--out", str(out)]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["scenario.yaml", "summary.json"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["completed"] == 40
    assert summary["headway"]["percentile_error"] == RELATIVE_ERROR
    assert "percentiles are off by" in capsys.readouterr().out
    for words in (["--warmup", "1"], ["--replications", "2"]):
        assert main(["run", str(path), "--no-tables", *words]) == 2
        assert capsys.readouterr().err.startswith(
            "headway: error: --no-tables: cannot be used with"
        )


def test_why_all_requests_are_rejected_is_told(tmp_path):
    """As in a run with tables, as far as no request is kept."""
    path = tmp_path / "s.yaml"
    path.write_text(SMALL)
    with pytest.warns(match="were rejected: prompts of max_model_len .5. tokens or more, or"):
        run_streamed(load_scenario(path, ["engine.max_model_len=5"]))
