"""The recorder of a live server, over a stand-in of vLLM's scheduler with a clock that we set.

(Where vLLM is installed, its own classes are watched in `tests/calibration/test_from_vllm.py`.)
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calibration.server_logs.from_steps import read_steps
from headway.conformance.live import read_live
from headway.vllm import steps


class FakePool:
    """Blocks that nobody takes."""

    cached_block_hash_to_block: dict[bytes, object] = {}  # noqa: RUF012

    def get_num_free_blocks(self) -> int:
        return 9


class FakeScheduler:
    """What the recorder asks of vLLM's: chunks of 4 tokens, then answers of 3."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.block_size = 4
        self.max_num_running_reqs, self.max_num_scheduled_tokens, self.max_model_len = 8, 64, 100
        self.scheduler_config = SimpleNamespace(
            policy="fcfs",
            async_scheduling=True,
            enable_chunked_prefill=True,
            long_prefill_token_threshold=0,
        )
        self.cache_config = SimpleNamespace(num_gpu_blocks=10, enable_prefix_caching=True)
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(sliding_window=8))]
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=groups, prefix_cache_retention_interval=16
        )
        self.kv_cache_manager = SimpleNamespace(block_pool=FakePool())
        self.parallel_config = SimpleNamespace(pipeline_parallel_size=1)
        nothing = dict.fromkeys(("speculative_config", "lora_config", "kv_transfer_config"))
        self.vllm_config = SimpleNamespace(**nothing)

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.running.append(request)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), 0

    def schedule(self) -> Any:
        tokens, new = {}, []
        for name, request in self.requests.items():
            left = request.num_prompt_tokens - request.num_computed_tokens
            tokens[name] = min(left, 4) if left > 0 else 1
            if not request.num_computed_tokens:
                new.append(SimpleNamespace(req_id=name))
            request.num_computed_tokens += tokens[name]
        return SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        )

    def update_from_output(self, output: Any, tokens: str) -> str:
        for name in output.num_scheduled_tokens:
            request = self.requests[name]
            request.num_output_tokens += 1
            if request.num_output_tokens == 3:
                self._free_request(self.requests.pop(name))
        return tokens

    def finish_requests(self, names: list[str], _: object) -> None:
        for name in names:
            self._free_request(self.requests.pop(name))

    def _preempt_request(self, request: Any) -> None:
        raise AssertionError(request)

    def _free_request(self, request: Any) -> None:
        self.running.remove(request)


def request(name: str) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=6,
        max_tokens=3,
        priority=0,
        arrival_time=1.0,
        block_hashes=[b"\0\0\0\0\0\7more"],
        num_computed_tokens=0,
        num_output_tokens=0,
    )


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps in flight, of which one is over, and an abort."""
    now = [0]
    monkeypatch.setattr(steps.time, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(steps, "check_vllm", lambda _: (0, 32, 0))
    path = tmp_path / "steps.jsonl"
    scheduler = FakeScheduler()
    steps.LiveVllm(scheduler, path)

    def at(moment: int, call: Any, *given: Any) -> Any:
        now[0] = moment
        return call(*given)

    at(5, scheduler.add_request, request("a"))
    at(6, scheduler.add_request, request("b"))
    first = at(10, scheduler.schedule)
    second = at(11, scheduler.schedule)
    assert at(15, scheduler.update_from_output, first, "tokens") == "tokens"
    third = at(16, scheduler.schedule)
    at(22, scheduler.update_from_output, second, "tokens")
    at(32, scheduler.update_from_output, third, "tokens")
    at(33, scheduler.add_request, request("c"))
    at(34, scheduler.schedule)
    at(35, scheduler.finish_requests, ["c"], "aborted")
    at(36, scheduler.schedule)
    return path


def test_a_live_record_has_what_was_scheduled_and_when(file: Path) -> None:
    """A step scheduled ahead begins when the one before it is over."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kinds = [row["type"] for row in rows]
    assert kinds == [
        *("case", "arrival", "arrival", "step", "step", "step", "request", "request"),
        *("arrival", "abort", "empty"),
    ]
    assert rows[0]["config"]["kv_cache_groups"] == [8]
    assert rows[0]["config"]["prefix_cache_retention_interval"] == 16
    assert rows[1]["hash_ids"] == [7]
    steps = [row for row in rows if row["type"] == "step"]
    assert [(row["t"], row["start"], row["dur"]) for row in steps] == [
        (10, 10, 5),
        (11, 15, 7),
        (16, 22, 10),
    ]
    assert [row["sched"] for row in steps] == [
        [[0, 4, 0], [1, 4, 0]],
        [[0, 2, 4], [1, 2, 4]],
        [[0, 1, 6], [1, 1, 6]],
    ]
    assert [row["new"] for row in steps] == [[[0, 0], [1, 0]], [], []]
    assert steps[2]["finished"] == [0, 1]


def test_the_file_is_good_up_to_a_line_that_is_cut_off(file: Path) -> None:
    """As by a server that was killed while it wrote."""
    with file.open("a") as more:
        more.write('{"type":"arri')
    assert len(read_live(file).steps) == 3


def test_steps_are_read_for_a_fit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calibration.server_logs.from_steps.FEWEST", 1)
    rows = read_steps(file)
    assert [(row.decodes, row.context, row.chunks) for row in rows] == [
        (0, 0, ((0, 4), (0, 4))),
        (0, 0, ((4, 2), (4, 2))),
        (2, 14, ()),
    ]
    assert [row.wall_s for row in rows] == [5e-9, 7e-9, 10e-9]
