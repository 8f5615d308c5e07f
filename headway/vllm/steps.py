"""What the scheduler of a vLLM does, told to the step recorder: in a case, or on a live server.

It wraps methods of one scheduler, decides nothing and keeps no request longer than vLLM does. On a
live server each row is written at once, whole: the file is good up to the last line also where the
server was killed. Releases differ: `interface.py`.
"""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headway.vllm.engine_fields import vllm_fields
from headway.vllm.interface import check_vllm, on_preemption
from headway.vllm.interface import resumed as back_again
from headway.vllm.step_recorder import RequestSeen, Row, StepRecorder
from simulator.schedulers.vllm.rules import write_release

LIVE = "live"
"""The name of the case that a live server's record is."""


class VllmSteps:
    """Watches one scheduler of vLLM's. `now` is its clock, ns; `number` makes ids of names."""

    def __init__(
        self,
        vllm: Any,
        recorder: StepRecorder,
        now: Callable[[], int],
        number: Callable[[str], int],
    ) -> None:
        self.vllm, self.recorder = vllm, recorder
        self._now, self._number = now, number
        self._evicted: list[int] = []
        self.left: list[Any] = []  # vLLM's requests that the outcome at hand, or an abort, ended
        self._pool = vllm.kv_cache_manager.block_pool
        self._asynchronous = bool(vllm.scheduler_config.async_scheduling)
        self._wrap()

    def _wrap(self) -> None:
        vllm = self.vllm
        on_preemption(vllm, check_vllm("step recorder"), self._preempts)
        schedule, update = vllm.schedule, vllm.update_from_output

        def on_schedule(*given: Any, **named: Any) -> Any:
            t = self.begin()
            output = schedule(*given, **named)
            self.take_in(t, output)
            return output

        def on_update(output: Any, *given: Any, **named: Any) -> Any:
            now = self.outcome_begins(output)
            self.left.clear()
            outcome = update(output, *given, **named)
            self.outcome_is_over(now, output)
            return outcome

        vllm.schedule, vllm.update_from_output = on_schedule, on_update
        free = vllm._free_request

        def on_free(request: Any, *more: Any, **named: Any) -> Any:
            self.left.append(request)
            return free(request, *more, **named)

        vllm._free_request = on_free

    def _preempts(self, request: Any) -> None:
        number = self._number(request.request_id)
        self._evicted.append(number)
        self.recorder.requests[number].thrown_out += 1

    def begin(self) -> int:
        """A step is about to be decided; return when."""
        self._evicted.clear()
        return self._now()

    def take_in(self, t: int, output: Any) -> None:
        """Take in what vLLM decided at `t`."""
        self.recorder.schedule(self.row(t, output))

    def row(self, t: int, output: Any) -> Row | None:
        """Describe a step just scheduled; None: nobody was scheduled or preempted."""
        tokens: dict[str, int] = output.num_scheduled_tokens
        if not tokens and not self._evicted:
            return None
        vllm, number = self.vllm, self._number
        requests = vllm.requests
        scheduled, context = [], 0
        for name, count in tokens.items():
            computed = requests[name].num_computed_tokens  # which counts what is scheduled now
            scheduled.append([number(name), count, computed - count])
            context += computed
        entered = [new.req_id for new in output.scheduled_new_reqs]
        back = back_again(output.scheduled_cached_reqs)
        if back:
            entered += [name for name in tokens if name in back]
        starts = [
            (number(name), requests[name].num_computed_tokens - tokens[name]) for name in entered
        ]
        new, resumed = self.recorder.admit(t, starts) if starts else ([], [])
        waiting = vllm.waiting
        return {
            "t": t,
            "dur": 0,
            "tokens": output.total_num_scheduled_tokens,
            "context": context,
            "sched": scheduled,
            "new": new,
            "resumed": resumed,
            "preempted": self._evicted.copy(),
            "finished": [],
            "free": self._pool.get_num_free_blocks(),
            "free_end": 0,
            "hashed": len(self._pool.cached_block_hash_to_block),
            "running": len(vllm.running),
            "waiting": vllm.get_request_counts()[1],
            "head": number(waiting.peek_request().request_id) if waiting else None,
        } | self._more_fields(t, output)

    def _more_fields(self, t: int, output: Any) -> Row:
        """Describe what is encoded and evicted, where there is an encoder, and when it starts."""
        found: Row = {}
        if getattr(self.vllm, "max_num_encoder_input_tokens", 0):
            encoded = output.scheduled_encoder_inputs.items()
            found["encoded"] = [[self._number(name), numbers] for name, numbers in encoded]
            found["evicted"] = output.free_encoder_mm_hashes
            if output.ec_connector_metadata is not None:
                loaded = output.ec_connector_metadata.items()
                found["loaded"] = [[self._number(name), numbers] for name, numbers in loaded]
        return found | ({"start": t} if self._asynchronous else {})

    def outcome_begins(self, output: Any) -> int:
        """Hear that the tokens of the oldest step are there; return when."""
        return self._now()

    def outcome_is_over(self, now: int, output: Any) -> None:
        """Hear that they have been taken in."""
        finished = [self._number(request.request_id) for request in self.left]
        self.recorder.finish(now, finished)
        free = self._pool.get_num_free_blocks()
        self.recorder.outcome({"finished": finished, "free_end": free})


class LiveVllm(VllmSteps):
    """Watches the scheduler of a live server, and writes a file.

    Beside steps and, when they end, requests, its rows are: `arrival`, when the scheduler gets a
    request; `empty`, a step with nobody in it; and `abort`. Times are ns since the file began. `t`
    of a step is when the scheduler was asked; it lasts until its tokens are there, from then or
    from the end of the step before it.
    """

    def __init__(self, vllm: Any, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._origin = time.perf_counter_ns()
        self._numbers: dict[str, int] = {}
        self._arrived = 0
        self._end = 0  # when the last tokens came back
        recorder = StepRecorder(self._write_line)
        recorder.write(_header(vllm))
        super().__init__(vllm, recorder, self._elapsed, self._numbers.__getitem__)
        add, finish = vllm.add_request, vllm.finish_requests

        def on_add(request: Any, *more: Any, **named: Any) -> Any:
            if request.request_id not in self._numbers:  # else it is more input for one
                self._arrive(request)
            return add(request, *more, **named)

        def on_finish(*given: Any, **named: Any) -> Any:
            self.left.clear()
            outcome = finish(*given, **named)
            self._write_ends("abort")
            return outcome

        vllm.add_request, vllm.finish_requests = on_add, on_finish

    def _elapsed(self) -> int:
        return time.perf_counter_ns() - self._origin

    def _write_line(self, text: str) -> None:
        os.write(self._file, f"{text}\n".encode())

    def _arrive(self, request: Any) -> None:
        """Write down a request that the scheduler gets."""
        number = self._numbers[request.request_id] = self._arrived
        self._arrived += 1
        self.recorder.requests[number] = RequestSeen()
        self.recorder.write(
            {
                "type": "arrival",
                "id": number,
                "t": self._elapsed(),
                "name": request.request_id,
                "prompt_len": request.num_prompt_tokens,
                "max_tokens": request.max_tokens,
                "priority": request.priority,
                "arrival_time": request.arrival_time,
                "hash_ids": _hash_ids(request.block_hashes),
            }
        )

    def take_in(self, t: int, output: Any) -> None:
        super().take_in(t, output)
        if not output.num_scheduled_tokens:
            self.recorder.write({"type": "empty", "t": t})

    def outcome_begins(self, output: Any) -> int:
        now = self._elapsed()
        row = self.recorder.oldest()
        if row is not None and row["tokens"]:
            start = max(row["t"], self._end)
            if "start" in row:
                row["start"] = start
            row["dur"] = now - start
            self._end = now
        return now

    def outcome_is_over(self, now: int, output: Any) -> None:
        super().outcome_is_over(now, output)
        if self.left:
            self._write_ends("request")

    def _write_ends(self, kind: str) -> None:
        """Write down the requests that have left, and forget them."""
        for request in self.left:
            number = self._numbers.pop(request.request_id)
            seen = self.recorder.requests.pop(number)
            first = request.num_prompt_tokens // self.vllm.block_size  # block with generated tokens
            self.recorder.write(
                {
                    "type": kind,
                    "id": number,
                    "t": self._elapsed(),
                    "output_tokens": request.num_output_tokens,
                    "cached": seen.cached,
                    "preemptions": seen.thrown_out,
                    "hash_ids": _hash_ids(request.block_hashes[first:]),
                }
            )
        self.left.clear()


def _hash_ids(hashes: Iterable[bytes]) -> list[int]:
    """Name full blocks, each with all before it, by 48 bits of vLLM's hashes."""
    return [int.from_bytes(one[:6], "big") for one in hashes]


def _header(vllm: Any) -> Row:
    """Describe the scheduler of a live server, as the first row of a case does."""
    config, cache = vllm.scheduler_config, vllm.cache_config
    specs = [group.kv_cache_spec for group in vllm.kv_cache_config.kv_cache_groups]
    beyond = {
        "speculative_config": vllm.vllm_config.speculative_config,
        "lora_config": vllm.vllm_config.lora_config,
        "kv_transfer_config": vllm.vllm_config.kv_transfer_config,
        "multimodal inputs": getattr(vllm, "max_num_encoder_input_tokens", 0),
        "pipeline_parallel_size": max(vllm.parallel_config.pipeline_parallel_size - 1, 0),
    }
    kinds = {type(spec).__name__ for spec in specs}
    unknown = sorted(kinds - {"FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec"})
    return {
        "type": "case",
        "schema": 1,
        "name": LIVE,
        "vllm": write_release(check_vllm("step recorder")),
        "scheduler": f"{type(vllm).__module__}.{type(vllm).__qualname__}",
        "derived": vllm_fields(vllm.vllm_config),
        "beyond": [*[name for name, value in beyond.items() if value], *unknown],
        "config": {
            "policy": getattr(config.policy, "value", config.policy),
            "max_num_seqs": getattr(vllm, "max_num_active_reqs", vllm.max_num_running_reqs),
            "max_num_batched_tokens": vllm.max_num_scheduled_tokens,
            "max_model_len": vllm.max_model_len,
            "enable_chunked_prefill": _chunked(config),
            "long_prefill_token_threshold": config.long_prefill_token_threshold,
            "long_prefill_token_threshold_adaptive": getattr(
                config, "long_prefill_token_threshold_adaptive", False
            ),
            "reserve_full_isl": getattr(config, "scheduler_reserve_full_isl", False),
            "watermark": getattr(config, "watermark", 0.0),
            "prefill_schedule_interval": getattr(config, "prefill_schedule_interval", 1),
            "async_scheduling": bool(config.async_scheduling),
            "block_size": vllm.block_size,
            "num_gpu_blocks": cache.num_gpu_blocks,
            "enable_prefix_caching": bool(cache.enable_prefix_caching),
            "kv_cache_groups": [getattr(spec, "sliding_window", None) or 0 for spec in specs],
            "prefix_cache_retention_interval": getattr(
                vllm.kv_cache_config, "prefix_cache_retention_interval", None
            ),
        },
    }


def _chunked(config: Any) -> bool:
    return bool(getattr(config, "chunked_prefill_enabled", config.enable_chunked_prefill))
