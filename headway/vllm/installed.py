"""The scheduler of the vLLM that is installed, in the place of Headway's own.

`engine: {scheduler: vllm}` puts it under Headway's workload, clock, cost model and metrics: slow
(some 2,000 steps a second, and 10 s to start), but the real thing, or whatever `scheduler_cls`
names. No GPU and no weights are touched. vLLM is imported here and in `interface.py`, which has
what differs between its releases. It is one file, in which all of vLLM's pieces are put together.
"""

import json
import os
import tempfile
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.vllm.interface import (
    MAMBA,
    MISSING,
    check_vllm,
    has,
    kv_cache,
    on_preemption,
    sampled,
)
from headway.vllm.pretended import H100, pretended
from simulator.core.log import pack_run
from simulator.core.request import Chunk, Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.interface import Traits
from simulator.schedulers.limits import VLLM_LIMITS, Limits
from simulator.schedulers.vllm.rules import OPTIONS_SINCE, Release, write_release
from simulator.util.environment import environment
from simulator.util.errors import HeadwayError, ScenarioError, one_line

WHO = "engine.scheduler"
_NAME_BITS = 32  # a token's number is that of its name, then its place in so many bits
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 1 << 30,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""A model of full attention in every layer; its sizes play no part in scheduling."""


class _Queue:
    """vLLM's waiting requests, as far as a replica asks."""

    moves = True

    def __init__(self, owner: "InstalledScheduler") -> None:
        self._owner = owner

    def __len__(self) -> int:
        return 0 if self._owner.vllm is None else len(self._owner.vllm.waiting)

    def add(self, request: Request) -> bool:
        raise NotImplementedError

    def put_back(self, request: Request) -> None:
        raise NotImplementedError

    def remove(self, request: Request) -> None:
        raise NotImplementedError

    def head(self) -> Request:
        return self._owner.requests[self._owner.vllm.waiting.peek_request().request_id]

    def take(self) -> Request:
        taken = self._owner.vllm.waiting.pop_request()
        return self._owner.requests[taken.request_id]


class InstalledBlocks(BlockCounter):
    """What vLLM's block pool was seen to hold."""

    in_cache = 0  # distinct hashes

    @property
    def hashed(self) -> int:
        return self.in_cache


class InstalledScheduler(SchedulerBase):
    """vLLM's scheduler behind the interface of Headway's.

    `blocks` says how many there are and takes note of how many vLLM has left. `scheduler_cls` is
    vLLM's option: the class, or `package.module.Class`. `environment` holds while vLLM starts: a
    class that is built by name has its arguments from there. If the class has a `clock`, it is the
    simulated one.
    """

    blocks: InstalledBlocks

    def __init__(
        self,
        blocks: InstalledBlocks,
        limits: Limits,
        *,
        enable_prefix_caching: bool = True,
        policy_name: str = "fcfs",
        scheduler_cls: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(blocks, limits)
        self._environment = environment or {}
        # The engine says whether it overlaps.
        overlaps = limits.async_scheduling
        self.traits = Traits(overlaps=overlaps, cancels=False)  # type: ignore[misc]
        options: dict[str, Any] = {name: getattr(limits, name) for name in VLLM_LIMITS}
        options |= {"policy": policy_name, "async_scheduling": overlaps}
        if scheduler_cls is not None:
            options["scheduler_cls"] = scheduler_cls
        self._options = options
        self._caching = enable_prefix_caching
        self.vllm: Any = None  # started by the first request: it takes some seconds
        self.requests: dict[str, Request] = {}
        self.waiting = _Queue(self)
        self._numbers: dict[Hashable, int] = {}
        self._in_flight: deque[tuple[Any, list[Request]]] = deque()
        self._evicted: list[str] = []
        self._scheduled: dict[str, int] = {}  # tokens by the step at hand
        if find_spec("vllm") is None:
            raise ScenarioError("engine.scheduler", MISSING)

    def _start_vllm(self) -> None:
        """Start vLLM's scheduler, and listen to whom it preempts."""
        with environment(self._environment):
            self.vllm, self._new_request = start_vllm(self._options, self.blocks, self._caching)
        if hasattr(self.vllm, "clock"):
            self.vllm.clock = lambda: self.now
        on_preemption(
            self.vllm, check_vllm(WHO), lambda request: self._evicted.append(request.request_id)
        )

    def add(self, request: Request) -> bool:
        if self.vllm is None:
            self._start_vllm()
        request.output_limit = self.output_limit(request)
        output, allowed = request.output_tokens, request.max_tokens or request.output_tokens
        name = _name(request)
        self.requests[name] = request
        tokens = [
            self._token(part, place) for part, count in request.contents for place in range(count)
        ]
        made = self._new_request(name, tokens, allowed, request.arrival, request.priority)
        if allowed > output:  # it ends by a stop token, which nobody knows beforehand
            last = self._token(("out", request.id), output - 1)
            made.sampling_params.stop_token_ids = [last]
        made.sampling_params.extra_args = _declared(request)
        self.vllm.add_request(made)
        return True

    def _token(self, name: Hashable, place: int) -> int:
        number = self._numbers.setdefault(name, len(self._numbers))
        return (number << _NAME_BITS) + place

    def schedule(self, now: float) -> Step:
        """Let vLLM decide, and say it in Headway's words."""
        self.now = now
        self.preempted = 0
        self._evicted.clear()
        output = self.vllm.schedule()
        self._scheduled = output.num_scheduled_tokens
        running = {self.requests[request.request_id]: None for request in self.vllm.running}
        for name in self._evicted:
            self.preempt(self.requests[name])
        admitted = {request for request in running if request not in self.running}
        for request in running:
            if request in admitted:
                self.start(request)
        self.running.clear()
        self.running.update(running)
        self.running.partial.clear()
        step, with_token = Step([]), []
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.requests[name]
            start = self.vllm.requests[name].num_computed_tokens - tokens
            request.computed = start + tokens
            if request.generated >= request.output_limit:  # a stop token is on its way
                step.add_single(request, start)
                step.ghosts += 1
                continue
            final = request.computed == request.prompt_tokens + request.generated
            decodes = final and tokens == 1 and request.generated > 0 and request not in admitted
            if decodes:
                step.add_single(request, start)
            else:
                step.prefills.append(Chunk(request, start, tokens))
            if final:
                request.generated += 1
                with_token.append(request)
            else:
                self.running.partial.append(request)
        self._count_blocks()
        if step.decodes or step.prefills:
            self._in_flight.append((output, with_token))
        else:
            self._update(output, [])
        return step

    def start(self, request: Request) -> None:
        vllm = self.vllm.requests[_name(request)]
        start = vllm.num_computed_tokens - self._scheduled[vllm.request_id]
        if request.first_scheduled < 0:
            request.cached = start
        else:
            self.running.resume(request, self.now, start)
        super().start(request)

    def preempt(self, request: Request) -> None:
        self.running.pause(request, self.now, request.computed)
        request.preemptions += 1
        request.computed = 0
        self.preempted += 1
        self.running.pop(request, None)

    def _count_blocks(self) -> None:
        """See how many blocks vLLM has left."""
        pool = self.vllm.kv_cache_manager.block_pool
        self.blocks.free = pool.get_num_free_blocks()
        self.blocks.in_cache = len(pool.cached_block_hash_to_block)

    def horizon(self, step: Step) -> int:
        return 1

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        """Hand vLLM the tokens of the oldest batch in flight; return who finished."""
        now = ends[-1]
        output, with_token = self._in_flight.popleft()
        for request in with_token:
            self.running.runs += pack_run(now, request.id, 0, 0)
            if request.first_token < 0:
                request.first_token = now
        over = self._update(output, with_token)
        for request in over:
            request.finish = now
            self.running.pop(request, None)
        self.ended = bool(over)
        return over

    def _update(self, output: Any, with_token: list[Request]) -> list[Request]:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        live = {name: self.vllm.requests.get(name) for name in names}
        getting = {_name(request) for request in with_token}
        live = {name: request for name, request in live.items() if request is not None}
        tokens = [
            [self._token(("out", self.requests[name].id), live[name].num_output_tokens)]
            if name in getting
            else [self._token("ghost", 0)]
            if name not in live
            else []
            for name in names
        ]
        self.vllm.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled(check_vllm(WHO), tokens),
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        self._count_blocks()
        return [self.requests[name] for name, one in live.items() if one.is_finished()]

    def stored(self, step: Step) -> int:
        """Tokens of the running requests, at most what the blocks in use hold."""
        used = (self.blocks.usable - self.blocks.free) * self.blocks.block_size
        return min(used, sum(request.computed for request in self.running))


def _name(request: Request) -> str:
    """Name a request for vLLM, which compares names as strings."""
    return f"{request.id:012d}"


def _declared(request: Request) -> dict[str, Any]:
    """Say of a request what its client says in `vllm_xargs`.

    `max_tokens` is what the client allows, 0 where it does not say: vLLM is given the length of the
    answer for it, which nobody knows beforehand.
    """
    found: dict[str, Any] = {"client": request.client, "max_tokens": request.max_tokens or 0}
    if request.hint is not None:
        found["hint"] = request.hint
    return found


def start_vllm(
    options: dict[str, Any],
    blocks: BlockCounter,
    enable_prefix_caching: bool,
    windows: Sequence[int | str] = (0,),
    *,
    max_loras: int = 0,
    retention: int | None = None,
    unit: int | None = None,
    checkpoints: int = 0,
    kv_transfer: Mapping[str, Any] | None = None,
    drafts: Mapping[str, Any] | None = None,
) -> tuple[Any, Callable[..., Any]]:
    """Start vLLM's scheduler; return it and what makes a request for it.

    `windows` has one for each of its KV cache groups, in tokens; 0: full attention, MAMBA:
    states. `max_loras` is vLLM's; 0: no adapters. `retention` is its
    prefix_cache_retention_interval, `unit` its prefix_match_unit, `checkpoints` the
    prefill_checkpoint_alignment of states that have a checkpoint block. `kv_transfer` is its
    configuration of a connector, `drafts` has `method` and `num_speculative_tokens`.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.structured_output import StructuredOutputManager
    except ImportError as error:
        raise HeadwayError(
            f"engine.scheduler: the installed vLLM cannot be imported: {error}"
        ) from error
    release = check_vllm(WHO)
    asked: dict[str, Any] = _known(release, options, EngineArgs)
    asked |= {"block_size": blocks.block_size, "enable_prefix_caching": enable_prefix_caching}
    asked |= {"num_gpu_blocks_override": blocks.usable + 1}
    if max_loras:
        asked |= {"enable_lora": True, "max_loras": max_loras}
    if retention is not None:
        asked["prefix_cache_retention_interval"] = retention
    if kv_transfer:
        asked["kv_transfer_config"] = KVTransferConfig(**kv_transfer)
    if drafts:
        asked["speculative_config"] = {name: value for name, value in drafts.items() if value}
    config = _derive(asked)
    cache = config.cache_config
    cache.num_gpu_blocks = blocks.usable + 1
    if MAMBA in windows:
        cache.mamba_cache_mode = "align"
    size = {"block_size": blocks.block_size} if has(release, "block_size") else {}
    if unit is not None:
        size["hash_block_size"] = cache.prefix_match_unit = unit
    kind = config.model_config.dtype
    with pretended(H100):
        scheduler = _scheduler_class(config.scheduler_config)(
            vllm_config=config,
            kv_cache_config=kv_cache(blocks, kind, windows, retention, checkpoints),
            structured_output_manager=StructuredOutputManager(config),
            log_stats=False,
            **size,
        )
    beyond = getattr(config, "num_hash_lookahead_tokens", 0)  # from 0.33 on
    hashed = (unit or blocks.block_size, beyond) if enable_prefix_caching else None
    return scheduler, _request_maker(release, hashed)


def _derive(asked: dict[str, Any]) -> Any:
    """Let vLLM's own EngineArgs derive its configuration, for a small model on an H100."""
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder, pretended(H100):
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        fixed = {"model": folder, "tokenizer": folder, "skip_tokenizer_init": True, "seed": 0}
        method = asked.get("speculative_config", {}).get("method")
        if method == "ngram" and asked["async_scheduling"]:  # ahead by kernels alone
            asked["speculative_config"]["method"] = "ngram_gpu"
        elif method not in (None, "ngram"):  # MTP is of few models, and decides as EAGLE
            kind = "eagle" if method == "mtp" else method
            asked["speculative_config"] |= {"method": kind, "model": folder}
        config = EngineArgs(**fixed, dtype="float16", **asked).create_engine_config()
        if method is not None:
            config.speculative_config.method = method
        return config


def _known(release: Release, options: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Leave out options that a release lacks, where they ask for nothing; HeadwayError if not."""
    fields = {*kind.__dataclass_fields__}
    named = {"scheduling_policy" if name == "policy" else name: options[name] for name in options}
    lacking = {name: value for name, value in named.items() if name not in fields}
    for name, value in lacking.items():
        if value not in (OPTIONS_SINCE[name][1], name == "scheduler_reserve_full_isl"):
            what = f"vLLM {write_release(release)}, which is installed, has no such option"
            raise HeadwayError(f"engine.{name}: {what}")
    return {name: value for name, value in named.items() if name in fields}


def _scheduler_class(config: Any) -> Any:
    """Find the class that decides; HeadwayError where there is none of its name."""
    try:
        if hasattr(config, "get_scheduler_cls"):
            return config.get_scheduler_cls()
        from vllm.utils import resolve_obj_by_qualname

        kind = config.scheduler_cls
        if not isinstance(kind, str):
            return kind
        own = "vllm.v1.core.sched.scheduler.Scheduler"
        return resolve_obj_by_qualname(own if kind == "vllm.core.scheduler.Scheduler" else kind)
    except (ImportError, AttributeError, ValueError) as error:
        what = f"engine.scheduler_cls: cannot load {config.scheduler_cls}: {one_line(error)}"
        raise HeadwayError(what) from error


def _request_maker(release: Release, hashed: tuple[int, int] | None) -> Callable[..., Any]:
    """Return what makes vLLM's request of id, tokens, output, arrival, priority and more.

    `hashed` are the tokens of a hash, and those behind it that it covers; None: there are none.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request as VllmRequest

    if has(release, "block_size"):
        from vllm.utils.hashing import get_hash_fn_by_name
    else:
        from vllm.utils import get_hash_fn_by_name
    more: dict[str, Any] = {} if has(release, "no_eos_token_id") else {"eos_token_id": None}
    hasher = None
    if hashed is not None:
        function = get_hash_fn_by_name("sha256")
        init_none_hash(function)
        block_size, beyond = hashed
        more_hashed = {"num_hash_lookahead_tokens": beyond} if beyond else {}
        hasher = get_request_block_hasher(block_size, function, **more_hashed)

    def make(
        name: str, tokens: list[int], output: int, arrival: float, priority: int, **own: Any
    ) -> Any:
        return VllmRequest(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
            pooling_params=None,
            arrival_time=arrival,
            priority=priority,
            block_hasher=hasher,
            **more,
            **own,
        )

    return make
