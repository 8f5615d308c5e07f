"""vLLM's /metrics of engines that run, counted as requests come and go."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from time import time

import numpy as np

from headway.report.prometheus import SCALARS, histogram_kinds
from headway.twin.live_engine import ABORT, Gaps, LiveEngine, Stream
from simulator.core.log import DRAFT
from simulator.core.request import Media, Request, Step, items_of
from simulator.engine.core import EngineCore
from simulator.schedulers.door import Door


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
        name, upto = f"vllm:{self.name}", [*accumulate(map(float, self.counts))]
        rows = zip((*self.buckets, "+Inf"), upto, strict=True)
        found = [f'{name}_bucket{{{label},le="{bound}"}} {count!r}' for bound, count in rows]
        found += [f"{name}_sum{{{label}}} {self.sum!r}", f"{name}_count{{{label}}} {upto[-1]!r}"]
        return found


class _Counts:
    """What has come of the requests of one engine core."""

    def __init__(self, longest: int) -> None:
        self.values: Counter[tuple[str, str]] = Counter()  # by family, and value of its label
        self.seen: set[Media] = set()  # images and clips of prompts
        self.tokens = 0  # that the steps so far have computed or generated, once one has come out
        self.drafted = -1.0  # s, when the last step with drafts began
        kinds = histogram_kinds(longest, ("run", "server"))
        self.histograms = {name: Histogram(name, *kind) for name, kind in kinds.items()}

    def add(self, name: str, count: int, value: str = "") -> None:
        """Count something of a family."""
        self.values[f"{name}_total", value] += count

    def begin(self, request: Request, looked_up: bool) -> None:
        """Count a prompt whose first token has come; `looked_up`: in a prefix cache."""
        tokens, hits = request.prompt_tokens, request.cached
        self.add("prompt_tokens", tokens)
        self.add("prefix_cache_queries", tokens * looked_up)
        for name in ("prefix_cache_hits", "prompt_tokens_cached"):
            self.add(name, hits)
        self.add("prompt_tokens_cached_by_source", hits, "device")
        self.add("prompt_tokens_by_source", tokens - hits, "local_compute")
        self.add("prompt_tokens_by_source", hits, "local_cache_hit")
        for item in items_of(request.segments):
            self.add("mm_cache_queries", 1)
            self.add("mm_cache_hits", item.media in self.seen)
            self.seen.add(item.media)


class LiveMetrics:
    """Listens to an engine, and tells /metrics."""

    def __init__(self, engine: LiveEngine, model: str) -> None:
        self.engine = engine
        self.started = time()  # of the wall's clock: from then on it counts
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self.model = f'model_name="{escaped}"'  # a label of all metrics
        self.counts = {core: _Counts(engine.spec.max_model_len) for core in engine.cores}
        engine.on_tokens, engine.on_end = self._tokens, self._end
        engine.on_step, engine.on_gaps = self._step, self._gaps

    def _step(self, core: EngineCore, step: Step) -> None:
        counts = self.counts[core]
        tokens = counts.values["generation_tokens_total", ""]
        tokens += counts.values["prompt_tokens_by_source_total", "local_compute"]
        if tokens > counts.tokens:  # as vLLM, which sees no step without an output
            counts.histograms["iteration_tokens_total"].observe(tokens - counts.tokens)
            counts.tokens = tokens
        if step.drafts:
            last = np.frombuffer(bytes(core.log.draft_rows[-DRAFT.itemsize :]), DRAFT)
            if last.size and last["start"][0] != counts.drafted:  # else all of them had ended
                counts.drafted = float(last["start"][0])
                counts.add("spec_decode_num_drafts", int(last["decodes"][0]))
                counts.add("spec_decode_num_draft_tokens", int(last["drafts"][0]))

    def _gaps(self, core: EngineCore, gaps: Gaps, now: float) -> None:
        counts = self.counts[core]
        for last, times in gaps.items():
            counts.add("generation_tokens", times)
            counts.histograms["inter_token_latency_seconds"].observe(now - last, times)

    def _tokens(self, stream: Stream, new: int, now: float) -> None:
        assert stream.core is not None
        counts, request = self.counts[stream.core], stream.request
        counts.add("generation_tokens", new)
        found = counts.histograms
        if stream.last < 0:
            counts.begin(request, self.engine.scenario.engine.enable_prefix_caching)
            found["time_to_first_token_seconds"].observe(now - stream.asked.arrival)
        else:
            found["inter_token_latency_seconds"].observe(now - stream.last)
            counts.add("spec_decode_num_accepted_tokens", new - 1)
        found["inter_token_latency_seconds"].observe(0.0, new - 1)  # of one step: at once

    def _end(self, stream: Stream, reason: str) -> None:
        if stream.core is None:
            return
        counts, request = self.counts[stream.core], stream.request
        counts.add("num_preemptions", request.preemptions)
        if reason == ABORT or request.finish < 0:
            return  # vLLM forgets them, too
        counts.add("request_success", 1, reason)
        first, decode = request.first_token, request.finish - request.first_token
        values = {
            "request_prompt_tokens": request.prompt_tokens,
            "request_generation_tokens": request.generated,
            "request_time_per_output_token_seconds": decode / max(request.generated - 1, 1),
            "e2e_request_latency_seconds": request.finish - stream.asked.arrival,
            "request_queue_time_seconds": request.first_scheduled - stream.asked.arrival,
            "request_inference_time_seconds": request.finish - request.first_scheduled,
            "request_prefill_time_seconds": first - request.first_scheduled,
            "request_decode_time_seconds": decode,
            "request_params_max_tokens": request.max_tokens or self.engine.spec.max_model_len,
            "request_num_preemptions": request.preemptions,
            "request_prefill_kv_computed_tokens": request.prompt_tokens - request.cached,
        }
        (asked := stream.asked).ended.append(request.generated)
        if len(asked.ended) == asked.n:  # once for all answers to a prompt
            values |= {"request_max_num_generation_tokens": max(asked.ended)}
            values |= {"request_params_n": asked.n}
        for name, value in values.items():
            counts.histograms[name].observe(float(value))

    def text(self) -> str:
        """Return the text exposition format, `engine` per engine core."""
        cores = enumerate(self.engine.cores)
        labels = {core: f'{self.model},engine="{number}"' for number, core in cores}
        config, late = self.engine.scenario.engine, self.engine.clock.lateness()
        told = ["run", "server"] + ["drafts"] * (config.speculative_config is not None)
        told += ["one tier"] * (config.kv_offloading_size is None)  # else which had them is unknown
        values = {core: self._values(core) for core in labels}
        lines: list[str] = []
        for one in SCALARS:
            if one.of not in told:
                continue
            rows = {
                label + (f',{one.label}="{value}"' if value else ""): values[core][one.name, value]
                for core, label in labels.items()
                for value in one.values.split() or [""]
            }
            lines += _family(f"vllm:{one.name}", one.kind, one.about, rows)
        for name, first in next(iter(self.counts.values())).histograms.items():
            lines += _family(f"vllm:{name}", "histogram", first.about, {})
            for core, label in labels.items():
                lines += self.counts[core].histograms[name].lines(label)
        door = self.engine.cores[0].door or Door(None, None)
        rows = {f'{self.model},reason="{why}"': count for why, count in door.refusals.items()}
        about = "Requests that a limit of the queue kept out."
        lines += _family("vllm:admission_rejections_total", "counter", about, rows)
        rows = {self._cache_config(core, number): 1 for number, core in enumerate(labels)}
        about = "Information of the LLMEngine CacheConfig"
        lines += _family("vllm:cache_config_info", "gauge", about, rows)
        about = "Start time of the process since 1970, s."
        lines += _family("process_start_time_seconds", "gauge", about, {"": self.started})
        rows = {f'quantile="{q[1:]}"': late[q] / 1e3 for q in late}
        about = "Wall time by which tokens of steps are late."
        lines += _family("headway:late_seconds", "gauge", about, rows)
        about, rows = "Simulated seconds per second.", {"": self.engine.clock.speed}
        return "\n".join([*lines, *_family("headway:speed", "gauge", about, rows), ""])

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

    def _values(self, core: EngineCore) -> Mapping[tuple[str, str], float]:
        """Return what is counted, and the gauges, as of now."""
        values = defaultdict[tuple[str, str], float](float, self.counts[core].values)
        live = self.engine.streams.values()
        preempted = sum(one.request.preemptions for one in live if one.core is core)
        values["num_preemptions_total", ""] += preempted
        gone = not core.scheduler.running and not core.scheduler.waiting  # since the last step
        gauges = self.engine.gauges[core].items()
        values |= {(name, ""): 0.0 if gone else value for name, value in gauges}
        values["num_requests_waiting_by_reason", "capacity"] = values["num_requests_waiting", ""]
        values["engine_sleep_state", "awake"] = 1
        return values


def _family(name: str, kind: str, about: str, rows: Mapping[str, float]) -> list[str]:
    """Return the lines of a metric: a value for each of its labels."""
    told = (f"{name}{{{k}}} {float(v)!r}" if k else f"{name} {float(v)!r}" for k, v in rows.items())
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *told]
