"""Schedules of the installed SGLang: its scheduler decides a case, and every step is written down.

What decides is SGLang's: `Scheduler` with its own `__init__`, event loops, queue, prefix tree and
memory pools. In place of a model is a worker that gives each request its next token by name, and in
place of a socket the case's requests, on a clock that counts nanoseconds. It runs on a CPU
(`stand_ins.py`).

Each case has a process of its own: SGLang keeps its settings in the process.
"""

import json
import logging
import os
import tempfile
from array import array
from collections import deque
from contextlib import suppress
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headway.conformance.case_model import SglangCase, SglangRequest
from headway.sglang.drafting import Drafting, drafting_arguments
from headway.sglang.host_copies import Links
from headway.sglang.plugin import hook
from headway.sglang.stand_ins import load_sglang, recorded_scheduler
from headway.vllm.engine_fields import derived_fields
from headway.vllm.installed import MODEL
from headway.vllm.policy import VARIABLE
from headway.vllm.step_recorder import RequestSeen, Row, StepRecorder
from simulator.util.errors import HeadwayError, one_line

ENVIRONMENT = ("init_new_token_ratio", "min_new_token_ratio_factor", "new_token_ratio_decay_steps",
               "retract_decode_steps")  # fmt: skip
"""Settings of a case that SGLang takes from variables."""
NOT_ARGUMENTS = (*ENVIRONMENT, "hash_id_tokens", "scheduling_policy", "acceptance")
IDLE_PASSES = 1000  # in a row; then whoever waits waits for ever
QUEUE_SHOWN = 8


def record(case: SglangCase) -> list[str]:
    """Let the installed SGLang decide a case; return the lines of the recording.

    HeadwayError where there is no SGLang that this fits, or it cannot run here.
    """
    load_sglang()
    fork = get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(there, case))
    process.start()
    there.close()
    try:
        lines: list[str] | str = here.recv()
    except EOFError:
        lines = "SGLang ended without an answer"
    process.join()
    if isinstance(lines, str):
        raise HeadwayError(f"headway.sglang: {case.name}: {lines}")
    return lines


def _work(answer: Connection, case: SglangCase) -> None:
    """Record a case in this process, and send the lines, or what went wrong."""
    logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory() as folder:
            answer.send(_Recording(case, Path(folder)).play())
    except Exception as error:
        answer.send(f"{type(error).__name__}: {one_line(error)}")
    finally:
        answer.close()
    os._exit(0)  # SGLang has threads that would be waited for


class _Over(Exception):  # noqa: N818  it is no error
    """The case is over."""


class _Recording:
    """One case, played by SGLang in this process."""

    def __init__(self, case: SglangCase, folder: Path) -> None:
        import torch
        from sglang.srt.managers import scheduler
        from sglang.srt.managers.utils import GenerationBatchResult
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.srt.server_args import PortArgs, ServerArgs

        torch.set_num_threads(1)
        self._torch, self._result = torch, GenerationBatchResult
        self.case = case
        config = case.config
        (folder / "config.json").write_text(
            json.dumps(MODEL | {"torch_dtype": "float32", "vocab_size": 1 << 40, "eos_token_id": 0})
        )
        for name in ENVIRONMENT:
            os.environ[f"SGLANG_{name.upper()}"] = str(getattr(config, name))
        given = config.model_dump(exclude={*NOT_ARGUMENTS}, exclude_none=True)
        self._clock = self._busy_until = 0
        self._links: Links | None = None
        if config.enable_hierarchical_cache:
            self._links = Links(case, lambda: self._clock, lambda: self._busy_until)
            given |= {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}
        else:
            del given["hicache_ratio"], given["hicache_write_policy"]
        self.drafting = None if config.drafts is None else Drafting(config.drafts)
        given |= drafting_arguments(folder, drafts=self.drafting is not None)
        arguments = ServerArgs(
            **given,
            model_path=str(folder),
            device="cpu",
            skip_tokenizer_init=True,
            disable_cuda_graph=True,
            sampling_backend="pytorch",
            attention_backend="torch_native",
            stream_interval=10**9,
        )
        self._arguments = arguments
        ports = PortArgs.init_new(arguments)
        if config.scheduling_policy is not None:
            os.environ[VARIABLE] = json.dumps(config.scheduling_policy)
            ordering = hook()
            ordering.clock = lambda: float(self._clock)
            HookRegistry.apply_hooks()
        scheduler.publish(
            arguments,
            role="scheduler",
            ranks=scheduler.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0),
        )
        self._names: dict[object, int] = {}
        self._requests = case.requests
        self._prompts = [self._prompt(request) for request in case.requests]
        self._coming = deque(sorted(case.requests, key=lambda one: one.arrival_ns))
        self._news = self._no_news()
        self._entries: dict[int, int] = {}  # by request, when it queued up last, as a number
        self._count = 0
        self._idle = 0
        self._lines: list[str] = []
        self._recorder = StepRecorder(self._lines.append)
        self._recorder.requests = {one.id: RequestSeen() for one in case.requests}
        self._here: dict[int, Any] = {}  # SGLang's requests, by id
        self._aborted: set[int] = set()
        self._thrown = self._thrown_before = 0  # out, so far and before the pass at hand
        self.sglang: Any = recorded_scheduler(self, arguments, ports)
        self._loaded: dict[str, int] = {}  # tokens from the host, of who was just admitted
        if self._links is not None:
            self._watch_loads(self.sglang.tree_cache)

    def _watch_loads(self, cache: Any) -> None:
        load = cache.init_load_back

        def watched(params: Any) -> Any:
            told = load(params)
            if told[0]:
                self._loaded[params.req.rid] = told[0]
            return told

        cache.init_load_back = watched

    def play(self) -> list[str]:
        """Play the case; return the lines of the recording."""
        self._recorder.write(self._header())
        with suppress(_Over):
            self.sglang.run_event_loop()
        here = self._here
        gone = self._aborted | {name for name, req in here.items() if req.finished()}
        done = all(one.id in gone for one in self._requests)
        self._recorder.end(map(self._request_row, self._requests), complete=done)
        return self._lines

    def _header(self) -> Row:
        config = self.case.config.model_dump()
        if config["scheduling_policy"] is None:
            del config["scheduling_policy"]
        return {
            "type": "case",
            "schema": 1,
            "name": self.case.name,
            "sglang": version("sglang"),
            "torch": self._torch.__version__,
            "derived": derived_fields({"": self._arguments}),
            "config": config,
            "step_time": self.case.step_time.model_dump(),
            "requests": len(self._requests),
        }

    # Requests come, and are given tokens.

    def _number(self, name: object) -> int:
        return self._names.setdefault(name, len(self._names) + 1)

    def _prompt(self, request: SglangRequest) -> list[int]:
        """Return a prompt's tokens: numbers of names, the same wherever the name is."""
        segments = request.named_prompt(self.case.config.hash_id_tokens)
        if segments is None:
            segments = ((("in", request.id), request.prompt_len),)
        return [self._number((name, at)) for name, count in segments for at in range(count)]

    def arrivals(self) -> list[Any]:
        """Return SGLang who has come by now."""
        come = []
        while self._coming and self._coming[0].arrival_ns <= self._clock:
            come.append(self._tokenized(self._coming.popleft()))
        return come

    def _tokenized(self, request: SglangRequest) -> Any:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
        from sglang.srt.sampling.sampling_params import SamplingParams

        most = request.max_new_tokens or request.output_len
        last = self._number((("out", request.id), request.output_len - 1))
        custom = {"client": request.client or None, "hint": request.hint}
        params = SamplingParams(
            max_new_tokens=most,
            stop_token_ids={last} if most > request.output_len else None,
            ignore_eos=request.ignore_eos,
            custom_params={key: value for key, value in custom.items() if value is not None},
        )
        params.normalize(None)
        return TokenizedGenerateReqInput(
            rid=f"{request.id:06}",  # hrrn ranks equals by it
            input_text=None,
            input_ids=array("q", self._prompts[request.id]),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            priority=request.priority if self.case.config.enable_priority_scheduling else None,
            time_stats=APIServerReqTimeStats(),
        )

    def compute(self, batch: Any) -> Any:
        """Return each request of a batch its next token, known by its place."""
        if self.drafting is not None:
            return self.drafting.compute(batch, self._result, self._answer)
        tokens = [
            self._answer(int(request.rid), length - len(request.origin_input_ids))
            for request, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True)
        ]
        return self._result(next_token_ids=self._torch.tensor(tokens, dtype=self._torch.int64))

    def _answer(self, request: int, place: int) -> int:
        return self._number((("out", request), place) if place >= 0 else None)

    # What SGLang does.

    def _no_news(self) -> Row:
        return {"retracted": [], "preempted": [], "aborted": [], "spins": 0}

    def queued(self, req: Any, *, is_retracted: bool) -> None:
        """Hear of who queues up."""
        name = int(req.rid)
        self._count += 1
        self._entries[name] = self._count
        if name not in self._here:
            self._here[name] = req
            if self.case.config.scheduling_policy is not None:
                req.time_stats.wait_queue_entry_time = float(self._requests[name].arrival_ns)
        else:
            self._recorder.requests[name].thrown_out += 1
            self._thrown += 1
            self._news["retracted" if is_retracted else "preempted"].append(name)

    def aborted(self, req: Any) -> None:
        """Hear of who is sent away for good."""
        name = int(req.rid)
        self._news["aborted"].append(name)
        self._aborted.add(name)
        self._thrown += 1
        self._recorder.finish(self._clock, [name])

    def idle(self) -> None:
        """Hear of a pass in which nothing runs, nor is in flight."""
        self._idle += 1
        if self._idle > IDLE_PASSES:
            raise HeadwayError("somebody waits for ever")
        store = None if self._links is None else self._links.next_store()
        due = [one.arrival_ns for one in [*self._coming][:1]]
        waits = bool(self.sglang.waiting_queue)
        self._news["spins"] += waits
        if waits and self._thrown > self._thrown_before:
            return  # there is memory for others
        if store is not None or (due and not waits):
            self._clock = max(self._clock, min(due if store is None else [store, *due]))
        elif not waits and self.sglang.is_fully_idle():
            raise _Over

    def _memory(self) -> tuple[int, int]:
        scheduler = self.sglang
        free = scheduler.token_to_kv_pool_allocator.available_size()
        return int(free), int(scheduler.tree_cache.evictable_size())

    def begin_pass(self) -> None:
        """Hear that a pass begins."""
        self._thrown_before = self._thrown

    def chosen(self, plan: Any) -> None:
        """Hear what a pass has chosen."""
        batch, scheduler = plan.batch_to_run, self.sglang
        if not batch:
            return
        self._idle = 0
        rows = self._rows(batch)
        tokens = sum(row[1] for row in rows)
        context = sum(row[1] + row[2] for row in rows)
        duration = self.case.step_time.duration(tokens, context)
        start = max(self._clock, self._busy_until)
        if self._links is not None:
            duration = max(duration, self._links.begin_batch(start))
        self._busy_until = start + duration
        decodes = batch.forward_mode.is_decode()
        mixed = batch.forward_mode.is_mixed()
        fresh, resumed = self._admitted(batch, start)
        free, evictable = self._memory()
        waiting = scheduler.waiting_queue
        if self.case.config.scheduling_policy is not None:  # whose order nobody knows beforehand
            waiting = sorted(waiting, key=lambda req: self._entries[int(req.rid)])
        ratio = scheduler.new_token_ratio_tracker.current
        self._recorder.schedule(
            {
                "t": self._clock,
                "start": start,
                "dur": duration,
                "mode": "decode" if decodes else "mixed" if mixed else "prefill",
                "tokens": tokens,
                "context": context,
                "sched": rows,
                "new": fresh,
                "resumed": resumed,
                "chunked": None
                if scheduler.chunked_req is None
                else int(scheduler.chunked_req.rid),
                "retracted": self._news["retracted"],
                "preempted": self._news["preempted"],
                "aborted": self._news["aborted"],
                "finished": [],
                "free": free,
                "evictable": evictable,
                "ratio": round(ratio, 9),
                "full": plan.running_batch.batch_is_full,
                "running": len(plan.running_batch.reqs),
                "waiting": len(waiting),
                "queue": [int(req.rid) for req in waiting[:QUEUE_SHOWN]],
                "spins": self._news["spins"],
                **self._of_host(batch),
            }
        )
        self._news = self._no_news()
        if self.sglang.enable_overlap and self._recorder.in_flight == 1:
            self._clock = start

    def _of_host(self, batch: Any) -> Row:
        """Tell what those who are new in a batch have loaded, and what is free on the host."""
        if self._links is None:
            return {}
        loaded = [[int(req.rid), self._loaded.pop(req.rid)] for req in batch.reqs
                  if req.rid in self._loaded]  # fmt: skip
        return {"loaded": loaded, "host_free": self._host_free()}

    def _host_free(self) -> int:
        return int(self.sglang.tree_cache.cache_controller.mem_pool_host.available_size())

    def _rows(self, batch: Any) -> list[list[int]]:
        """List [id, tokens, tokens before] of those in a batch."""
        if batch.forward_mode.is_decode():
            if self.drafting is not None:
                return self.drafting.rows(batch.reqs, verify=True)
            lengths = batch.seq_lens.tolist()
            return [
                [int(req.rid), 1, length - 1]
                for req, length in zip(batch.reqs, lengths, strict=True)
            ]
        pairs = zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True)
        tails = [] if self.drafting is None else batch.decoding_reqs or []
        rows = [[int(r.rid), extend, start] for r, extend, start in pairs if r not in tails]
        return rows if self.drafting is None else rows + self.drafting.rows(tails, verify=False)

    def _admitted(self, batch: Any, start: int) -> tuple[list[list[int]], list[list[int]]]:
        """List [id, tokens found in the cache] of those who are new in a batch, or are back."""
        starts: list[tuple[int, int]] = []
        if not batch.forward_mode.is_decode():
            decoding = {req.rid for req in batch.decoding_reqs or ()}
            for req, prefix in zip(batch.reqs, batch.prefix_lens, strict=True):
                name = int(req.rid)
                if req.rid not in decoding and self._entries[name] >= 0:
                    self._entries[name] = -1
                    starts.append((name, prefix))
        return self._recorder.admit(start, starts)

    def computed(self) -> None:
        """Hear that the oldest batch in flight is over."""
        row = self._recorder.oldest()
        assert row is not None
        self._clock = row["start"] + row["dur"]

    def processed(self, batch: Any) -> None:
        """Hear that its outcome has been taken in."""
        finished, tokens = [], []
        for req in batch.reqs:
            name = int(req.rid)
            seen = self._recorder.requests[name]
            if req.output_ids and seen.first_token is None:
                tokens.append(name)
            if req.finished() and seen.finish is None:
                finished.append(name)
        self._recorder.count_tokens(self._clock, tokens)
        self._recorder.finish(self._clock, finished)
        free, evictable = self._memory()
        outcome = {"finished": finished, "free_end": free, "evictable_end": evictable}
        if self._links is not None:
            outcome["host_free_end"] = self._host_free()
        self._recorder.outcome(outcome)
        most = self.case.max_steps
        if most is not None and self._recorder.steps > most:
            raise _Over

    def _request_row(self, request: SglangRequest) -> Row:
        seen = self._recorder.requests[request.id]
        req = self._here.get(request.id)
        return {
            "id": request.id,
            "arrival": request.arrival_ns,
            "first_scheduled": seen.first_scheduled,
            "first_token": seen.first_token,
            "finish": seen.finish,
            "output_tokens": 0 if req is None else len(req.output_ids_through_stop),
            "cached": seen.cached,
            "retractions": seen.thrown_out,
            "reason": "FINISH_ABORT"
            if request.id in self._aborted
            else None
            if seen.finish is None or req is None
            else type(req.finished_reason).__name__,
        }
