"""Record what the installed vLLM decides on a case file: its scheduler in its own engine loop.

    python -m headway.conformance.record_vllm CASE.json OUT.jsonl.gz

The output is a recorded schedule for `headway conform CASE.json --golden OUT.jsonl.gz`. It needs a
vLLM that can be imported (its CPU dependencies suffice) but neither a GPU nor weights. Written for
vLLM 0.33: `EngineCoreProc._process_engine_step` calls `EngineCore.step` or `step_with_batch_queue`
and sleeps where it does, on a clock of this module's. Nothing of Headway's decides anything.
"""

import gzip
import sys
from collections import deque
from collections.abc import Container, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headway.conformance.case_model import Case, CaseRequest
from headway.conformance.cases import read_cases
from headway.conformance.recorder import SETTINGS, dump
from headway.conformance.transfers import Transfers
from headway.vllm.engine_fields import vllm_fields
from headway.vllm.installed import start_vllm
from headway.vllm.interface import check_vllm, is_chunk, resumed, sampled
from headway.vllm.pretended import Nothing
from headway.vllm.step_recorder import RequestSeen, Row, StepRecorder
from headway.vllm.steps import VllmSteps
from simulator.core.request import Media, Segments, items_of
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.vllm.rules import NEWEST_RELEASE, options_without_effect, read_release
from simulator.util.errors import HeadwayError, one_line
from simulator.util.files import write_atomic

NIXL_WORKERS = [
    f"vllm.distributed.kv_transfer.kv_connector.v1.nixl.{name}"
    for name in ("base_worker", "pull_worker", "push_worker", "worker")
] + ["vllm.distributed.nixl_utils"]
REMOTE = {
    "do_remote_prefill": True,
    "remote_block_ids": [[0]],
    "remote_engine_id": "producer",
    "remote_host": "producer",
    "remote_port": 1,
}
"""What a producer says of each prompt that it has computed."""


class StepLimitError(Exception):
    """The case has had its `max_steps`."""


@dataclass
class Batch:
    """What was scheduled at once: also the future of its outcome, which vLLM waits for."""

    engine: "RecordedVllm"
    output: Any  # vLLM's SchedulerOutput
    getting: list[str]  # those who get a token
    end: int = 0  # ns
    come: dict[str, int] = field(default_factory=dict)  # tokens of each that come out

    @property
    def entered(self) -> set[str]:
        """Name those who are new, or back after a preemption: nobody has drafted for them."""
        new = {one.req_id for one in self.output.scheduled_new_reqs}
        return new | resumed(self.output.scheduled_cached_reqs)

    def result(self) -> Any:
        """Wait for the end of the batch; give its tokens."""
        engine = self.engine
        engine.now = max(engine.now, self.end)
        return engine.model_output(self)


class _CaseSteps(VllmSteps):
    """Watches vLLM's scheduler on the clock of a case."""

    def __init__(self, engine: "RecordedVllm", recorder: StepRecorder) -> None:
        self._engine = engine
        super().__init__(engine.vllm, recorder, lambda: engine.now, int)

    def begin(self) -> int:
        if self.recorder.steps == self._engine.case.max_steps:
            raise StepLimitError
        return super().begin()

    def take_in(self, t: int, output: Any) -> None:
        super().take_in(t, output)
        self._engine.put_behind(output, self.recorder.newest())

    def outcome_begins(self, output: Any) -> int:
        engine = self._engine
        come = engine.batches.pop(id(output)).come
        tokens = [int(name) for name, count in come.items() for _ in range(count)]
        self.recorder.count_tokens(engine.now, tokens)
        return engine.now


@dataclass
class RecordedVllm:
    """A case in vLLM's engine loop; `rows` are those of the recorded schedule."""

    case: Case
    now: int = 0  # ns
    rows: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        config, drafts = self.case.config, self.case.config.speculative_config
        self._drafts = drafts.settings() if drafts is not None else None
        options = config.model_dump(include={*SETTINGS, "policy", "disable_chunked_mm_input"})
        options["scheduler_reserve_full_isl"] = config.reserve_full_isl
        blocks = BlockCounter(config.num_gpu_blocks, config.block_size)
        self.vllm, self._new_request = start_vllm(
            options,
            blocks,
            config.enable_prefix_caching,
            config.kv_cache_groups,
            max_loras=config.max_loras,
            retention=config.prefix_cache_retention_interval,
            unit=config.prefix_match_unit,
            checkpoints=config.checkpoints,
            kv_transfer=self._kv_transfer(),
            drafts=drafts.model_dump(exclude={"acceptance"}) if drafts is not None else None,
        )
        if config.encoder_cache_size:
            self._add_encoder()
        self._transfers = Transfers(self.case.step_time) if self.vllm.connector else None
        if config.kv_offloading_blocks:
            _order_ends(self.vllm.connector)
        self._recorder = StepRecorder(self.rows.append)
        self._recorder.requests = {request.id: RequestSeen() for request in self.case.requests}
        self._numbers: dict[Hashable, int] = {}
        self._stage_free = [0] * config.pipeline_parallel_size  # ns, when each has no batch
        self._known: dict[str, int] = {}  # ns, when each request's tokens in flight are there
        self._arrivals = deque(sorted(self.case.requests, key=lambda r: (r.arrival_ns, r.id)))
        self.batches: dict[int, Batch] = {}
        self._last: Batch | None = None
        _CaseSteps(self, self._recorder)
        self.core = self._make_core()

    def _kv_transfer(self) -> dict[str, Any]:
        """Make the configuration of vLLM's connector; of the host's a block takes 4 KiB there."""
        config = self.case.config
        if config.kv_role:
            # They want a GPU's kernels, and NIXL: nothing moves here.
            sys.modules.update({name: Nothing(name) for name in NIXL_WORKERS})
            return {"kv_connector": "NixlConnector", "kv_role": config.kv_role}
        if not config.kv_offloading_blocks:
            return {}
        room = config.kv_offloading_blocks << 12
        extra = {"cpu_bytes_to_use": room, "store_threshold": config.store_threshold}
        named = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        return named | {"kv_connector_extra_config": extra}

    def _add_encoder(self) -> None:
        """Give vLLM's scheduler an encoder: its model is one of text alone."""
        from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

        config = self.case.config
        self.vllm.max_num_encoder_input_tokens = config.max_num_encoder_input_tokens
        self.vllm.encoder_cache_manager = EncoderCacheManager(config.encoder_cache_size)
        if config.ec_cache:
            self.vllm.ec_connector = _connector(config.ec_cache)

    def _make_core(self) -> Any:
        """Put together what vLLM's engine loop looks at: an engine core without processes."""
        from vllm.v1.engine import core

        @contextmanager
        def nothing(_: object) -> Iterator[None]:
            yield

        size = self.vllm.vllm_config.max_concurrent_batches
        step = core.EngineCore.step if size == 1 else core.EngineCore.step_with_batch_queue
        core.get_watch_dog = lambda: SimpleNamespace(feed=lambda: None)
        engine = SimpleNamespace(
            scheduler=self.vllm,
            model_executor=SimpleNamespace(
                execute_model=self._execute, sample_tokens=lambda _, non_block=False: self._last
            ),
            batch_queue=None if size == 1 else deque(maxlen=size),
            batch_queue_size=size,
            is_mm_encoder_only=False,
            is_ec_consumer=True,  # up to 0.30, of whoever does more than encode
            is_pooling_model=False,
            check_for_draft_tokens=False,
            async_scheduling=self.case.config.async_scheduling,
            output_queue=SimpleNamespace(put_nowait=lambda _: None),
            log_error_detail=nothing,
            capture_iteration_details=nothing,
            _should_throttle_prefills=lambda: False,
            _process_aborts_queue=lambda: None,
            _attach_iteration_details=lambda *_: None,
            _attach_weight_version=lambda *_: None,
            post_step=self._propose,
        )
        engine.step_fn = lambda: step(engine)
        return engine

    def put_behind(self, output: Any, row: Row | None) -> None:
        """Put what vLLM has just scheduled behind the batches in flight."""
        tokens = output.num_scheduled_tokens
        getting = [name for name in tokens if not is_chunk(self.vllm.requests[name])]
        start = end = max(self.now, self._stage_free[-1])
        times, overlaps = self.case.step_time, self.core.batch_queue is not None
        if row is not None:
            if tokens:
                after = max(self._known.get(name, 0) for name in tokens)
                end = self._pass(after, times.duration(row["tokens"], row["context"]))
                self._known.update(dict.fromkeys(getting, end))
            row["dur"] = end - start if tokens or overlaps else times.empty_ns
            if overlaps:
                row["start"] = start
        self._last = self.batches[id(output)] = Batch(self, output, getting, end)
        if self._transfers is not None:
            told = output.kv_connector_metadata
            if self.case.config.kv_role:
                pulled = told.reqs_to_recv.items()
                loads = [(name, len(one.local_block_ids[0]), name) for name, one in pulled]
            else:
                found = told.load_jobs.items()
                loads = [(key, len(one.dst_spec.block_ids), one.req_id) for key, one in found]
            self._transfers.send("load", loads, self.now)

    def _pass(self, after: int, duration: int) -> int:
        """Send a batch whose tokens are there at `after` through all stages; say when it is out."""
        at = max(self.now, after)
        for stage, free in enumerate(self._stage_free):
            at = self._stage_free[stage] = max(at, free) + duration
        return at

    def _execute(self, output: Any, non_block: bool = False) -> Batch:
        return self.batches[id(output)]

    def model_output(self, batch: Batch) -> Any:
        """Make the tokens of a batch: numbers that name request and place."""
        from vllm.v1.outputs import ModelRunnerOutput

        names, entered = list(batch.output.num_scheduled_tokens), batch.entered
        tokens = []
        for name in names:
            if name not in self.vllm.requests:  # it has ended by a stop token
                tokens.append([self._token("ghost", 0)])
                continue
            place, count = self.vllm.requests[name].num_output_tokens, 0
            if name in batch.getting:
                count = 1 + (0 if name in entered else self._accepted(batch, name, place))
                batch.come[name] = min(count, self.case.requests[int(name)].output_len - place)
            places = range(place, place + count)
            tokens.append([self._token(("out", int(name)), at) for at in places])
        told = None
        if self._transfers is not None:
            stores = getattr(batch.output.kv_connector_metadata, "store_jobs", {}).items()
            jobs = [(key, len(one.src_spec.block_ids), "") for key, one in stores]
            self._transfers.send("store", jobs, self.now)
            told = self._transfers.report(self.now)
        return ModelRunnerOutput(
            kv_connector_output=told,
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled(check_vllm("record_vllm"), tokens),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _accepted(self, batch: Batch, name: str, place: int) -> int:
        """Count the drafts of a request that are right, and that its answer has room for."""
        right = len(batch.output.scheduled_spec_decode_tokens.get(name, ()))
        if not right or self._drafts is None:
            return 0
        request = self.vllm.requests[name]
        allowed: int = request.max_tokens
        stream = self._drafts.accepted(0, int(name), allowed)
        most: int = min(allowed, self.vllm.max_model_len - request.num_prompt_tokens)
        return min(stream[place], right, most - place - 1)

    def _propose(self, executed: bool) -> None:
        """Let those who were computed have drafts for their next step."""
        overlaps = self.case.config.async_scheduling  # then their places are scheduled unseen
        if self._drafts is None or not executed or self._last is None or overlaps:
            return
        from vllm.v1.outputs import DraftTokenIds

        names = list(self._last.output.num_scheduled_tokens)
        most = self._drafts.num_speculative_tokens
        count = getattr(self._last.output, "num_spec_tokens_to_schedule", most)
        drafts = [[0] * count for _ in names]
        self.vllm.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _token(self, name: Hashable, place: int) -> int:
        return (self._numbers.setdefault(name, len(self._numbers)) << 32) + place

    def _arrive(self) -> None:
        """Hand vLLM the requests whose time has come."""
        config = self.case.config
        while self._arrivals and self._arrivals[0].arrival_ns <= self.now:
            one = self._arrivals.popleft()
            named = one.named_prompt(config.hash_id_tokens) or ((("in", one.id), one.prompt_len),)
            tokens = [
                self._token("image", 0) if isinstance(part, Media) else self._token(part, at)
                for part, count in named
                for at in range(count)
            ]
            allowed = max(one.max_tokens or 0, one.output_len)
            made = self._new_request(
                _name(one),
                tokens,
                allowed,
                one.arrival_ns,
                one.priority or 0,
                lora_request=_adapter(one.adapter),
                mm_features=_images(named),
            )
            if config.kv_role:
                made.kv_transfer_params = REMOTE | {"remote_request_id": made.request_id}
            if allowed > one.output_len:  # it ends by a stop token
                last = self._token(("out", one.id), one.output_len - 1)
                made.sampling_params.stop_token_ids = [last]
            self.vllm.add_request(made)

    def _sleep(self, seconds: float) -> None:
        self.now += self.case.step_time.empty_ns

    def run(self) -> list[str]:
        """Let vLLM's loop run to the end; give the rows."""
        from vllm.v1.engine import core

        real, core.time = core.time, SimpleNamespace(sleep=self._sleep, monotonic=lambda: 0.0)
        try:
            while True:
                if not (self.vllm.has_requests() or self.core.batch_queue):
                    if not self._arrivals:
                        break
                    self.now = max(self.now, self._arrivals[0].arrival_ns)
                self._arrive()
                core.EngineCoreProc._process_engine_step(self.core)
        except StepLimitError:
            pass
        finally:
            core.time = real
        done = all(seen.finish is not None for seen in self._recorder.requests.values())
        self._recorder.end(map(self._request_row, self.case.requests), complete=done)
        return self.rows

    def _request_row(self, request: CaseRequest) -> Row:
        seen = self._recorder.requests[request.id]
        return {
            "id": request.id,
            "arrival": request.arrival_ns,
            "first_scheduled": seen.first_scheduled,
            "first_token": seen.first_token,
            "finish": seen.finish,
            "output_tokens": seen.tokens,
            "cached": seen.cached,
            "preemptions": seen.thrown_out,
        }


def _order_ends(connector: Any) -> None:
    """Tell vLLM's connector of those who end at once by their numbers: vLLM has them in a set."""
    build = connector.build_connector_meta

    def build_ordered(output: Any) -> Any:
        output.finished_req_ids = dict.fromkeys(sorted(output.finished_req_ids))
        return build(output)

    connector.build_connector_meta = build_ordered


def _name(request: CaseRequest) -> str:
    """Name a request for vLLM, which compares names as strings."""
    return f"{request.id:012d}"


def _adapter(number: int) -> Any:
    """Make an adapter for vLLM; None for number 0."""
    if not number:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"lora-{number}", number, f"/lora-{number}")


def _images(prompt: Segments) -> list[Any]:
    """Make the images of a prompt for vLLM."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return [
        MultiModalFeatureSpec(None, "image", item.media.name, PlaceholderRange(item.start, size))
        for item in items_of(prompt)
        if (size := item.end - item.start)
    ]


def _connector(names: Container[str]) -> Any:
    """Make a consumer's EC connector that has some outputs; what it is to load is its metadata."""
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    class Connector(ECConnectorBase):  # type: ignore[misc]
        def __init__(self) -> None:
            self._loads: dict[str, list[int]] = {}

        def has_cache_item(self, identifier: str) -> bool:
            return identifier in names

        def update_state_after_alloc(self, request: Any, index: int) -> None:
            if self.has_cache_item(request.mm_features[index].identifier):
                self._loads.setdefault(request.request_id, []).append(index)

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            loads, self._loads = self._loads, {}
            return loads

        def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
            raise NotImplementedError  # there is no worker

        save_caches = start_load_caches

    return Connector()


def record(case: Case) -> list[str]:
    """Return the lines of one case's recorded schedule."""
    options = options_without_effect(read_release(version("vllm")) or NEWEST_RELEASE)
    name = "prefix_cache_retention_interval"
    case = case.with_retention(options.get(name, 0))
    if name in options:  # the release has none, whatever the case asks for
        config = case.config.model_copy(update={name: options[name]})
        case = case.model_copy(update={"config": config})
    recorded = RecordedVllm(case)
    header = {
        "type": "case",
        "schema": 1,
        "name": case.name,
        "vllm": version("vllm"),
        "torch": version("torch"),
        "derived": vllm_fields(recorded.vllm.vllm_config),
        "config": case.config.model_dump(),
        "step_time": case.step_time.model_dump(),
        "requests": len(case.requests),
    }
    return [dump(header), *recorded.run()]


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    if len(arguments) != 2:
        print("usage: python -m headway.conformance.record_vllm CASE OUT", file=sys.stderr)
        return 2
    case, out = map(Path, arguments)
    try:
        lines = [line for one in read_cases(case) for line in record(one)]
        data = "".join([f"{line}\n" for line in lines]).encode()
        packed = gzip.compress(data, mtime=0) if out.suffix == ".gz" else data
        write_atomic(out, packed)
    except ImportError as error:
        what = f"vLLM cannot be imported in this Python: {one_line(error)}"
        print(f"record_vllm: error: {what}", file=sys.stderr)
        return 2
    except (HeadwayError, ValueError) as error:
        print(f"record_vllm: error: {one_line(error)}", file=sys.stderr)
        return 2
    print(f"written to {out}: {len(lines):,} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
