"""What a step costs, in closed form: a cost model that is an executor (and `LinearCost` beside it).
A step, a leap and whole arrays each have the terms, for speed; `terms.py` has the coefficients.

A step has T tokens in all, padding and ghosts included, in n sequences. Of these, N decode: they
read S cached tokens. The chunks of prompts have T_p tokens and P (query, key) pairs.

`LinearCost` is a straight line in T, S and n. `PiecewiseCost` has the terms of a real engine:

    pure decode   overhead + dense(T) + head(n) + decode + max(c S, e N, m)
    with prompts  overhead + dense(T) + head(n) + prefill + max(work, r K)
                  where work = d P + f T_p + k K_p + g n_p + c' S + e' N

- dense(T), the matrix products: a table, since GPUs work in tiles and waves; linear in between, and
  beyond with the mean slope of the table's upper half, since that of a single stair says nothing;
- head(n) = max(head, head_per_sequence n), the output projection, which reads its weights once;
- decode attention reads the cache (c S), unless so little of it that each sequence's fixed work
  (e N) takes longer, or what any launch takes (m);
- with prompts in the batch one kernel does all attention, built for many queries per sequence:
  decodes cost it more (c' >= c, e' >= e), and it can be no faster than the sequence with the most
  keys, K, whose keys pass one after the other (r K). Of the decodes only the mean context is known;
- an engine that computes its n_p chunks one by one, each over K_p keys gathered from the cache,
  pays for every chunk (g) and key (k); where decodes have a launch of their own, c' = c, and c' S
  is at least what that launch takes (`mixed_least`);
- an engine that launches pure decodes as CUDA graphs captured for a few batch sizes pads N to the
  next of them, `cudagraph_capture_sizes`: dense and head then cost what that size costs, by a table
  of their own where there is one (`graph_dense`). Attention does not, since padding reads no cache;
  a larger batch runs as it is;
- one that has graphs of steps with prompts pads their T to the next row of `graph_mixed`, which
  then stands for dense and prefill; more tokens, or more than 8 chunks, have no graph;
- where kernels are launched one by one, in all other steps, those of a small step are over before
  the next is launched: without `overhead` and `overhead_per_sequence` it takes no less than
  `launch`;
- the GPU waits `overhead_per_sequence` n besides `overhead`, in either kind of step;
- layers with linear attention read and write a state of each sequence, `state_per_sequence` N in
  pure decodes; beside prompts it is part of e';
- the host's work, h + h_n n + h_p n_p + h_t T_p, comes on top; where it is `overlapped` (an engine
  that schedules asynchronously) a step takes the longer of the two, and `overhead` besides;
- the API server streams a token of each sequence in another process, and no step is delivered
  sooner: it takes `stream_per_sequence` n at least, as the host's work where that is `overlapped`;
- layers with a sliding window of w tokens read min(S, w N) of the cache, as if all sequences were
  of the mean length; with terms of their own, added to c S, c' S and d P (of the pairs within);
- decodes that verify drafts (speculative decoding) have several queries each: dense(T) and head are
  those of all their tokens (as is the size of a CUDA graph), N counts sequences. Each reads its
  cache once, by the kernel built for many queries: max(c' S + e' N, r S / N) without prompts, too;
- KV blocks that a step first copies to the host or back (preemption by swap) take a time for each
  request and one for each block, in either form. They are added to the step, or, where copies
  overlap with compute, the longer of the two counts.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import itemgetter
from typing import Self

import numpy as np

from simulator.core.executor import MIXED_GRAPH_PROMPTS, Leap, Timing
from simulator.core.request import Step
from simulator.costs.cost_model import Counts, Seconds
from simulator.costs.tables import MAX_TABLE_TOKENS, Table
from simulator.costs.terms import ADDED_TERMS, CHUNK_TERMS, MIXED_TERMS, PiecewiseTerms
from simulator.models.sliding_window import window_pairs

MAX_TABLE_SEQUENCES = 1 << 10
"""Sequences up to which what depends on them is looked up; beyond, it is computed."""


@dataclass(frozen=True)
class PiecewiseCost(PiecewiseTerms):
    """The form at the head of this module; all coefficients in seconds, for all layers together.

    Below its first row the dense table is constant, above its last it goes on with the mean slope
    of its upper half, from half of its most tokens on.
    """

    # All that is looked up is made when a step asks: most costs are only put together, or checked.

    @cached_property
    def _largest_graph(self) -> int:
        return max(self.cudagraph_capture_sizes, default=0)

    @cached_property
    def _per_sequence(self) -> float:
        """In pure decodes."""
        return self.overhead_per_sequence + self.state_per_sequence

    @cached_property
    def _slope_beyond(self) -> float:
        """Seconds per token."""
        tokens, seconds = np.array(self.dense, float).T
        middle = max(tokens[-1] / 2, tokens[0])
        rise = seconds[-1] - float(np.interp(middle, tokens, seconds))
        return max(0.0, float(rise / (tokens[-1] - middle))) if len(tokens) > 1 else 0.0

    @cached_property
    def _dense(self) -> list[float]:
        """By tokens."""
        tokens, seconds = np.array(self.dense, float).T
        counts = np.arange(int(min(tokens[-1], MAX_TABLE_TOKENS)) + 1)
        found: list[float] = np.interp(counts, tokens, seconds).tolist()
        return found

    @cached_property
    def _decode(self) -> list[float]:
        """By sequences: every batch up to the largest graph takes what the next size takes.

        The table then reaches at least that far, so that looking it up is all that a step costs.
        """
        found = [self._unpadded(n) for n in range(min(len(self._dense), MAX_TABLE_SEQUENCES + 1))]
        done = 0
        table = np.array(self.graph_dense or [[1, 0.0]], float).T
        for size in self.cudagraph_capture_sizes:
            seconds = self._unpadded(size)
            if self.graph_dense:
                seconds = self.overhead + float(np.interp(size, *table)) + self.decode
            found[done + 1 : size + 1] = [seconds] * (size - done)
            done = size
        return found

    @cached_property
    def _graph_mixed(self) -> list[float]:
        """By tokens."""
        by_tokens = [0.0] if self.graph_mixed else []
        for tokens, seconds in self.graph_mixed:
            by_tokens += [seconds] * (int(tokens) + 1 - len(by_tokens))
        return by_tokens

    def _by_sequences(self) -> tuple[Counts, Seconds, Seconds]:
        """Return numbers of sequences; of each the GPU's waits, and what hides the host's work.

        A step whose kernels take less than the last shows the host's work: 0, there is none,
        infinity, the number of sequences alone does not tell.
        """
        counts = np.arange(min(len(self._dense), MAX_TABLE_SEQUENCES + 1), dtype=np.int64)
        waits = np.asarray(self.overhead + self.overhead_per_sequence * counts)
        hidden = waits + self._host_of_decodes(counts)
        if not self.overlapped:
            hidden[:] = self.stream_per_sequence * counts
            if any(getattr(self, name) for name in ADDED_TERMS):
                hidden[:] = inf
        return counts, waits, hidden

    @cached_property
    def _mixed_tables(self) -> tuple[list[float], ...]:
        """`_dense`; by sequences `overhead` and the GPU's waits, the head, and `hidden`."""
        counts, waits, hidden = self._by_sequences()
        by_chunks = self.host_per_prefill or self.host_per_prefill_token
        shown = [inf] * len(counts) if by_chunks else hidden.tolist()
        heads = np.maximum(self.head, self.head_per_sequence * counts)
        return self._dense, waits.tolist(), heads.tolist(), shown

    @cached_property
    def _mixed_terms(self) -> tuple[float, ...]:
        """MIXED_TERMS; whether there is other work, and whether `_adjust_mixed` is needed."""
        return (
            *(getattr(self, name) for name in MIXED_TERMS),
            any(getattr(self, name) for name in (*CHUNK_TERMS, "window", "mixed_least")),
            bool(self.launch or self.reads_longest or self.graph_mixed),
        )

    @cached_property
    def _decode_terms(self) -> list[tuple[float, ...]]:
        """By sequences: of pure decodes what does not depend on the context, the floor of
        attention, and `hidden`, infinity also where there are other terms."""
        counts, _, hidden = self._by_sequences()
        launched = (counts > self._largest_graph) & bool(self.launch)
        launched |= bool(self.window or self.reads_longest)
        decode = np.array(self._decode[: len(counts)]) + self._per_sequence * counts
        floors = np.maximum(self.decode_per_sequence * counts, self.decode_least)
        lists = (column.tolist() for column in (decode, floors, np.where(launched, inf, hidden)))
        return [*zip(*lists, strict=True)]

    def dense_seconds(self, tokens: int) -> float:
        """Return the time of the matrix products of so many tokens."""
        table = self._dense
        if tokens < len(table):
            return table[tokens]
        rows = self.dense
        above = bisect_right(rows, tokens, key=itemgetter(0))
        if above == len(rows):
            return rows[-1][1] + self._slope_beyond * (tokens - rows[-1][0])
        (t0, s0), (t1, s1) = rows[above - 1 : above + 1]
        return s0 + (s1 - s0) / (t1 - t0) * (tokens - t0)

    def _decode_seconds(self, count: int) -> float:
        """Return the time of a decode step without its attention to the cache."""
        return self._decode[count] if count < len(self._decode) else self._unpadded(count)

    def _unpadded(self, count: int) -> float:
        """Return that time of so many sequences, all of them real."""
        head = max(self.head, self.head_per_sequence * count)
        return self.overhead + self.dense_seconds(count) + head + self.decode

    def execute(self, step: Step) -> Timing:
        prefills, count, context, host = step.prefills, step.decodes, step.context, 0.0
        if not prefills:
            return self._execute_decodes(step)
        # Most steps of a busy engine come here: tables, and one look at all terms.
        dense, waits, heads, hidden = self._mixed_tables
        prefill, per_pair, per_token, per_context, per_decode, serial, more, adjusts = (
            self._mixed_terms
        )
        prompts = len(prefills)
        if prompts == 1:
            (chunk,) = prefills
            start, new = chunk.start, chunk.tokens
            keys = start + new
            pairs = new * start + new * (new + 1) // 2
            longest = keys
        else:
            new = pairs = keys = longest = 0
            for chunk in prefills:
                start, size = chunk.start, chunk.tokens
                end = start + size
                new += size
                keys += end
                pairs += size * start + size * (size + 1) // 2
                longest = end if end > longest else longest
        if longest * count < context:  # the mean decode reads more
            serial *= context / count
        else:
            serial *= longest
        work = per_pair * pairs + per_token * new + per_context * context + per_decode * count
        if more:
            work = self._with_more_work(step, work, keys)
        sequences = count + prompts
        rows = sequences + step.drafts  # of logits
        tokens = rows - prompts + new
        try:
            fixed, least = waits[sequences] + dense[tokens] + heads[rows], hidden[sequences]
        except IndexError:  # beyond the tables
            head = max(self.head, self.head_per_sequence * rows)
            fixed = self.overhead + self.overhead_per_sequence * sequences
            fixed, least = fixed + self.dense_seconds(tokens) + head, inf
        seconds = fixed + prefill + (work if work > serial else serial)
        if adjusts:
            seconds, host = self._adjust_mixed(step, seconds, new)
        elif seconds < least:
            seconds, host = self._with_host(seconds, sequences, prompts, new)
        if step.copies is None and not host:
            return Timing(seconds)
        return Timing(*self.with_copies(seconds, step), host=host)

    def _execute_decodes(self, step: Step) -> Timing:
        """Say what a step without prompts takes; most end with the first lines."""
        terms, count = self._decode_terms, step.decodes
        if count < len(terms) and not step.drafts and step.copies is None:
            fixed, floor, least = terms[count]
            read = self.decode_per_context * step.context
            seconds = fixed + (read if read > floor else floor)
            if seconds >= least:
                return Timing(seconds)
        if step.drafts:
            seconds, host = self._verify_seconds(step)
        else:
            leap = self.leap(step, 1)
            seconds, host = leap.seconds[0], sum(leap.host)
        return Timing(*self.with_copies(seconds, step), host=host)

    def _with_more_work(self, step: Step, work: float, keys: int) -> float:
        """Add the work of chunks one by one, over so many keys, and that within windows.

        Decodes take at least what their launch does.
        """
        if step.decodes and self.mixed_least:
            work += max(self.mixed_least - self.mixed_per_context * step.context, 0.0)
        if self.prefill_per_key or self.prefill_per_sequence:
            work += self.prefill_per_key * keys
            work += self.prefill_per_sequence * len(step.prefills)
        if self.window:
            work += self.mixed_per_window * min(step.context, self.window * step.decodes)
            for chunk in step.prefills:
                seen = window_pairs(chunk.start, chunk.tokens, self.window)
                work += self.prefill_per_window_pair * seen
        return work

    def _adjust_mixed(self, step: Step, seconds: float, new: int) -> tuple[float, float]:
        """Let a step with prompts run in its graph, or be no faster than its launches; add the
        host's work."""
        prompts = len(step.prefills)
        sequences = step.decodes + prompts
        graphs, tokens = self._graph_mixed, step.decodes + step.drafts + new
        if tokens < len(graphs) and prompts <= MIXED_GRAPH_PROMPTS:
            seconds += graphs[tokens] - self.dense_seconds(tokens) - self.prefill
        elif self.launch:
            waits = self.overhead_per_sequence * sequences
            seconds = max(seconds, self.overhead + waits + self.launch)
        return self._with_host(seconds, sequences, prompts, new)

    def _verify_seconds(self, step: Step) -> tuple[float, float]:
        """Return the time of a step of decodes that verify drafts, without swaps."""
        count, context = step.decodes, step.context
        work = self.mixed_per_context * context + self.mixed_per_sequence * count
        if self.window:
            work += self.mixed_per_window * min(context, self.window * count)
        work = max(work, self.serial_per_token * context / count)
        seconds = self._decode_seconds(count + step.drafts) + work
        waits = self.overhead_per_sequence * count
        seconds += waits
        if self.launch and count + step.drafts > self._largest_graph:
            seconds = max(seconds, self.overhead + waits + self.launch)
        return self._with_host(seconds, count)

    def _with_host(
        self, kernels: float, sequences: int, prompts: int = 0, new: int = 0
    ) -> tuple[float, float]:
        """Add the host's work, or let it hide behind the kernels; the GPU's waits hide nothing.

        Say also by how much what does not hide there makes the step longer.
        """
        if not self.has_host_work:
            return kernels, 0.0
        host = self._host_seconds(sequences, prompts, new)
        if not self.overlapped:
            return max(kernels + host, self.stream_per_sequence * sequences), 0.0
        least = self.overhead + self.overhead_per_sequence * sequences + host
        return (kernels, 0.0) if kernels >= least else (least, least - kernels)

    def _host_seconds(self, sequences: int, prompts: int, new: int) -> float:
        work = (
            self.host
            + self.host_per_sequence * sequences
            + self.host_per_prefill * prompts
            + self.host_per_prefill_token * new
        )
        return max(work, self.stream_per_sequence * sequences) if self.overlapped else work

    def _host_of_decodes(self, counts: Counts) -> Seconds:
        work = self.host + self.host_per_sequence * counts
        streamed = self.stream_per_sequence * counts
        return np.asarray(np.maximum(work, streamed) if self.overlapped else work)

    def host_seconds(self, prompts: Counts, sequences: Counts, new: Counts) -> Seconds | None:
        """Return the seconds in which the GPU waits for the engine; None: nobody can tell.

        That is what the engine adds to its kernels: launches, the way of the sampled tokens and,
        unless it is overlapped, the host's work.
        """
        if self.engine_overhead is None and not self.has_host_work:
            return None
        waits = (self.engine_overhead or 0.0) + self.overhead_per_sequence * sequences
        waits = waits + self.engine_prefill * (prompts > 0)
        if not self.overlapped:
            waits = waits + self.host + self.host_per_sequence * sequences
            waits = waits + self.host_per_prefill * prompts + self.host_per_prefill_token * new
        return np.asarray(waits)

    def leap(self, step: Step, repeats: int) -> Leap:
        count, first = step.decodes, step.context
        try:
            fixed, floor, least = self._decode_terms[count]
        except IndexError:  # beyond the table
            fixed = self._decode_seconds(count) + self._per_sequence * count
            floor, least = max(self.decode_per_sequence * count, self.decode_least), inf
        slope = self.decode_per_context
        contexts = range(first, first + repeats * count, count)
        if self.window:
            most, wide = self.window * count, self.decode_per_window
            found = [fixed + max(slope * read + wide * min(read, most), floor) for read in contexts]
        elif slope * first > floor:
            found = [fixed + slope * read for read in contexts]
        elif slope * contexts[-1] <= floor:
            found = [fixed + floor] * repeats
        else:
            found = [fixed + max(slope * read, floor) for read in contexts]
        if found[0] >= least:  # and so are the others, none of which is shorter
            return Leap(found)
        if self.launch and count > self._largest_graph:  # none is faster than its launches
            least = self.overhead + self.overhead_per_sequence * count + self.launch
            found = [max(seconds, least) for seconds in found]
        if not self.has_host_work:
            return Leap(found)
        shown = [self._with_host(seconds, count) for seconds in found]
        return Leap([seconds for seconds, _ in shown], [host for _, host in shown])

    def decode_seconds(self, counts: Counts, contexts: Counts) -> Seconds:
        table = np.array([self._decode_seconds(n) for n in range(int(counts.max(initial=0)) + 1)])
        reads = self.decode_per_context * contexts
        if self.window:
            reads = reads + self.decode_per_window * np.minimum(contexts, self.window * counts)
        reads = np.maximum(reads, np.maximum(self.decode_per_sequence * counts, self.decode_least))
        waits = self.overhead_per_sequence * counts
        seconds: Seconds = table[counts] + self._per_sequence * counts + reads
        if self.launch:
            launched = np.maximum(seconds, self.overhead + waits + self.launch)
            seconds = np.where(counts > self._largest_graph, launched, seconds)
        host, least = self._host_of_decodes(counts), self.stream_per_sequence * counts
        if self.overlapped:
            return np.asarray(np.maximum(seconds, self.overhead + waits + host))
        return np.asarray(np.maximum(seconds + host, least))

    def host_step_seconds(self, step: Step) -> float:
        prompts = step.prefills
        new = sum(chunk.tokens for chunk in prompts)
        return self._host_seconds(step.decodes + len(prompts), len(prompts), new)

    def with_experts(self, table: Table) -> Self:
        return replace(self, dense=add_tables(self.dense, table))


def add_tables(one: Table, two: Table) -> Table:
    """Add two dense tables, row by row of both; each goes on straight beyond its last row."""
    costs = PiecewiseCost(one), PiecewiseCost(two)
    rows = sorted({int(row[0]) for row in (*one, *two)})
    return [[tokens, sum(cost.dense_seconds(tokens) for cost in costs)] for tokens in rows]
