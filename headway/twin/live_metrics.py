"""vLLM's /metrics of engines that run, counted as requests come and go."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from time import time

import numpy as np

from headway.report.prometheus import SCALARS, histogram_kinds
from headway.twin.live_engine import ABORT, LiveEngine, Stream
from simulator.core.log import DRAFT
from simulator.core.request import Step
from simulator.engine.core import EngineCore
from simulator.schedulers.door import Door

MORE_SCALARS = (
    ("num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason."),
    ("engine_sleep_state", "gauge", "Whether the engine sleeps: it never does."),
    ("external_prefix_cache_queries_total", "counter", "Tokens asked of other instances: none."),
    ("external_prefix_cache_hits_total", "counter", "Tokens found at other instances: none."),
    ("mm_cache_queries_total", "counter", "Images and the like that were looked up: none."),
    ("mm_cache_hits_total", "counter", "Images and the like that were found: none."),
    ("prompt_tokens_by_source_total", "counter", "Prompt tokens by where they came from."),
    ("prompt_tokens_cached_total", "counter", "Prompt tokens found in a prefix cache."),
)
"""What a live server of vLLM 0.33 tells beside SCALARS."""
TIER_SCALARS = (
    ("prompt_tokens_cached_by_source_total", "counter", "Cached tokens by the tier that had them."),
)
DRAFT_SCALARS = (
    ("spec_decode_num_drafts_total", "counter", "Number of drafts."),
    ("spec_decode_num_draft_tokens_total", "counter", "Number of draft tokens."),
    ("spec_decode_num_accepted_tokens_total", "counter", "Number of accepted draft tokens."),
)
"""The same of an engine that decodes speculatively."""
TIERS = ("device", "host", "p2p", "disk", "external_unspecified")
PARAMS_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


class Histogram:
    """Counts of values up to each of some bounds."""

    def __init__(self, name: str, about: str, buckets: Sequence[float]) -> None:
        self.name, self.about, self.buckets = name, about, buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Take in a value that was seen so often."""
        self.counts[bisect_left(self.buckets, value)] += times
        self.sum += value * times

    def lines(self, label: str) -> list[str]:
        """Return the lines of the text format, without the head."""
        found, total = [], 0
        for bound, count in zip((*self.buckets, "+Inf"), self.counts, strict=True):
            total += count
            found.append(f'vllm:{self.name}_bucket{{{label},le="{bound}"}} {float(total)!r}')
        found.append(f"vllm:{self.name}_sum{{{label}}} {self.sum!r}")
        return [*found, f"vllm:{self.name}_count{{{label}}} {float(total)!r}"]


class _Counts:
    """What has come of the requests of one engine core."""

    def __init__(self, longest: int) -> None:
        self.queries = self.hits = self.preemptions = self.prompt_tokens = self.tokens = 0
        self.drafts = self.draft_tokens = self.accepted = 0
        self.drafted = -1.0  # s, when the last step with drafts began
        self.ended = {"stop": 0, "length": 0, "abort": 0, "error": 0, "repetition": 0}
        kinds = histogram_kinds(longest)
        tokens = kinds["request_prompt_tokens"][1]
        kinds |= {
            "request_max_num_generation_tokens": ("Longest of its n answers.", tokens),
            "request_params_n": ("The n of a request.", PARAMS_N_BUCKETS),
            "request_params_max_tokens": ("The max_tokens of a request.", tokens),
            "request_num_preemptions": ("Preemptions of a request.", PREEMPTIONS_BUCKETS),
            "request_prefill_kv_computed_tokens": ("Prompt tokens not cached.", tokens),
        }
        self.histograms = {name: Histogram(name, *kind) for name, kind in kinds.items()}


class LiveMetrics:
    """Listens to an engine, and tells /metrics."""

    def __init__(self, engine: LiveEngine, model: str) -> None:
        self.engine = engine
        self.started = time()  # of the wall's clock: from then on it counts
        self.model = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self.counts = {core: _Counts(engine.spec.max_model_len) for core in engine.cores}
        engine.on_tokens, engine.on_end = self._tokens, self._end
        engine.on_step, engine.on_gaps = self._step, self._gaps

    def _step(self, core: EngineCore, step: Step) -> None:
        counts = self.counts[core]
        tokens = step.decodes + sum(chunk.tokens for chunk in step.prefills)
        counts.histograms["iteration_tokens_total"].observe(float(tokens))
        if step.drafts:
            last = np.frombuffer(bytes(core.log.draft_rows[-DRAFT.itemsize :]), DRAFT)
            if last.size and last["start"][0] != counts.drafted:  # else all of them had ended
                counts.drafted = float(last["start"][0])
                counts.drafts += int(last["decodes"][0])
                counts.draft_tokens += int(last["drafts"][0])

    def _gaps(self, core: EngineCore, gaps: dict[float, int], now: float) -> None:
        counts = self.counts[core]
        for last, times in gaps.items():
            counts.tokens += times
            counts.histograms["inter_token_latency_seconds"].observe(now - last, times)

    def _tokens(self, stream: Stream, new: int, now: float) -> None:
        assert stream.core is not None
        counts, request = self.counts[stream.core], stream.request
        counts.tokens += new
        found = counts.histograms
        if stream.last < 0:
            counts.prompt_tokens += request.prompt_tokens
            if self.engine.scenario.engine.enable_prefix_caching:  # else vLLM looks nothing up
                counts.queries += request.prompt_tokens
            counts.hits += request.cached
            found["time_to_first_token_seconds"].observe(now - stream.sent_at)
            new -= 1
        else:
            found["inter_token_latency_seconds"].observe(now - stream.last)
            new -= 1
            counts.accepted += new
        if new:  # of one step: at once
            found["inter_token_latency_seconds"].observe(0.0, new)

    def _end(self, stream: Stream, reason: str) -> None:
        if stream.core is None:
            return
        counts, request = self.counts[stream.core], stream.request
        counts.preemptions += request.preemptions
        if reason in counts.ended:
            counts.ended[reason] += 1
        if reason == ABORT or request.finish < 0:
            return
        first, decode = request.first_token, request.finish - request.first_token
        for name, value in (
            ("request_prompt_tokens", request.prompt_tokens),
            ("request_generation_tokens", request.generated),
            ("request_time_per_output_token_seconds", decode / max(request.generated - 1, 1)),
            ("e2e_request_latency_seconds", request.finish - stream.sent_at),
            ("request_queue_time_seconds", request.first_scheduled - stream.sent_at),
            ("request_inference_time_seconds", request.finish - request.first_scheduled),
            ("request_prefill_time_seconds", first - request.first_scheduled),
            ("request_decode_time_seconds", decode),
            ("request_max_num_generation_tokens", request.generated),
            ("request_params_n", 1),
            ("request_params_max_tokens", request.max_tokens or self.engine.spec.max_model_len),
            ("request_num_preemptions", request.preemptions),
            ("request_prefill_kv_computed_tokens", request.prompt_tokens - request.cached),
        ):
            counts.histograms[name].observe(float(value))

    def text(self) -> str:
        """Return the text exposition format, `engine` per engine core."""
        labels = {
            core: f'model_name="{self.model}",engine="{number}"'
            for number, core in enumerate(self.engine.cores)
        }
        config, late = self.engine.scenario.engine, self.engine.clock.lateness()
        more = MORE_SCALARS + DRAFT_SCALARS * (config.speculative_config is not None)
        if config.kv_offloading_size is None:  # else which tier had cached tokens is not known
            more += TIER_SCALARS
        values = {core: self._scalars(core) | self._more_scalars(core) for core in labels}
        lines: list[str] = []
        for name, kind, about in SCALARS + more:
            rows = {
                label + more: value
                for core, label in labels.items()
                for more, value in values[core][name].items()
            }
            lines += _family(f"vllm:{name}", kind, about, rows)
        for name, first in next(iter(self.counts.values())).histograms.items():
            lines += _family(f"vllm:{name}", "histogram", first.about, {})
            for core, label in labels.items():
                lines += self.counts[core].histograms[name].lines(label)
        door = self.engine.cores[0].door or Door(None, None)
        rows = {
            f'model_name="{self.model}",reason="{why}"': count
            for why, count in door.refusals.items()
        }
        about = "Requests that a limit of the queue kept out."
        lines += _family("vllm:admission_rejections_total", "counter", about, rows)
        rows = {self._cache_config(core, number): 1 for number, core in enumerate(labels)}
        about = "Information of the LLMEngine CacheConfig"
        lines += _family("vllm:cache_config_info", "gauge", about, rows)
        about = "Start time of the process since 1970, s."
        lines += _family("process_start_time_seconds", "gauge", about, {"": self.started})
        rows = {f'quantile="{q[1:]}"': late[q] / 1e3 for q in late}
        about = "Wall time by which what steps bring is told too late."
        return "\n".join([*lines, *_family("headway:late_seconds", "gauge", about, rows), ""])

    def _cache_config(self, core: EngineCore, number: int) -> str:
        engine, blocks = self.engine.scenario.engine, core.scheduler.blocks
        labels = {
            "block_size": blocks.block_size,
            "cache_dtype": engine.kv_cache_dtype,
            "enable_prefix_caching": engine.enable_prefix_caching,
            "engine": number,
            "gpu_memory_utilization": engine.gpu_memory_utilization,
            "num_gpu_blocks": blocks.usable + 1,  # with the null block, which nobody gets
        }
        return ",".join(f'{name}="{value}"' for name, value in labels.items())

    def _scalars(self, core: EngineCore) -> dict[str, dict[str, float]]:
        counts, gauges = self.counts[core], self.engine.gauges[core]
        live = self.engine.streams.values()
        preempted = sum(one.request.preemptions for one in live if one.core is core)
        values = (
            *(gauges.running, gauges.waiting, gauges.kv_usage),
            *(counts.queries, counts.hits, counts.preemptions + preempted),
            *(counts.prompt_tokens, counts.tokens),
        )
        found: list[dict[str, float]] = [{"": float(value)} for value in values]
        ends = {f',finished_reason="{word}"': float(n) for word, n in counts.ended.items()}
        names = [name for name, *_ in SCALARS]
        return dict(zip(names, [*found, ends], strict=True))

    def _more_scalars(self, core: EngineCore) -> dict[str, dict[str, float]]:
        """Return the values of what is told beside SCALARS, by name and further labels."""
        counts, waiting = self.counts[core], self.engine.gauges[core].waiting
        labelled = {
            "num_requests_waiting_by_reason": ("reason", {"capacity": waiting, "deferred": 0}),
            "engine_sleep_state": (
                "sleep_state",
                {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
            ),
            "prompt_tokens_by_source_total": (
                "source",
                {
                    "local_compute": counts.prompt_tokens - counts.hits,
                    "local_cache_hit": counts.hits,
                    "external_kv_transfer": 0,
                },
            ),
            "prompt_tokens_cached_by_source_total": (
                "source",
                dict.fromkeys(TIERS, 0) | {"device": counts.hits},
            ),
        }
        plain = {
            "prompt_tokens_cached_total": counts.hits,
            "spec_decode_num_drafts_total": counts.drafts,
            "spec_decode_num_draft_tokens_total": counts.draft_tokens,
            "spec_decode_num_accepted_tokens_total": counts.accepted,
        }
        found = {name: {"": 0.0} for name, *_ in MORE_SCALARS}
        found |= {name: {"": float(value)} for name, value in plain.items()}
        for name, (label, values) in labelled.items():
            found[name] = {f',{label}="{key}"': float(n) for key, n in values.items()}
        return found


def _family(name: str, kind: str, about: str, rows: Mapping[str, float]) -> list[str]:
    """Return the lines of a metric: a value for each of its labels."""
    values = (
        f"{name}{{{k}}} {float(v)!r}" if k else f"{name} {float(v)!r}" for k, v in rows.items()
    )
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *values]
