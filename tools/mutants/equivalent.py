"""Mutants that no test can kill, as they change nothing that anybody sees, and why."""

KV_CACHE = {
    (
        "block_hashes.py",
        "return hash(('lora', request.model)) if request.model else 0",
        "return hash(('lora', request.model)) if request.model else 1",
    ): "any number may begin a chain of hashes",
    (
        "hierarchical_cache.py",
        "if (again or node not in self.inside) and self.good(node):",
        "if (again or node not in self.inside) or self.good(node):",
    ): "a node that may not be evicted, or is there twice, is passed over when its turn comes",
    (
        "radix_cache.py",
        "self._root = self._node(None, [], 0, locks=1)",
        "self._root = self._node(None, [], 1, locks=1)",
    ): "nobody reads the blocks of the root: every walk stops there",
    (
        "unshared_prefix_cache.py",
        "if count > self.free - self._cached:",
        "if count >= self.free - self._cached:",
    ): "`take` does the same, by a call, where there are just enough",
    (
        "unshared_radix_cache.py",
        "if ended and chain.locked == len(chain.nodes) and (chain.blocks >= prompt > 0):",
        "if ended and chain.locked == len(chain.nodes) and (chain.blocks > prompt > 0):",
    ): "`insert` does the same with more work where the prompt is just what is locked",
    (
        "unshared_radix_cache.py",
        "self.locked = 0",
        "self.locked = 1",
    ): "a chain sets it with its first node, and without one it counts for nothing",
    (
        "unshared_radix_cache.py",
        "self._clock += 1",
        "self._clock += 2",
    ): "the order of stamps counts",
    (
        "unshared_radix_cache.py",
        "if 0 < prompt < blocks:",
        "if 0 <= prompt < blocks:",
    ): "to follow a chain for no blocks does nothing",
    (
        "unshared_prefix_cache.py",
        "self._ages = 0",
        "self._ages = 1",
    ): "the order of ages counts",
    (
        "block_manager.py",
        "return self.names(request, count + 1)[count]",
        "return self.names(request, count + 2)[count]",
    ): "the hashes before the last are the same, however many are asked for",
}
OTHERS = {
    (
        "schedulers/vllm/scheduler.py",
        "ample = decodes.alike and blocks.free >= budget * groups",
        "ample = decodes.alike and blocks.free > budget * groups",
    ): "where just as many are free, to count finds the same, more slowly",
    (
        "schedulers/sglang/running_batch.py",
        "if last < self.least:",
        "if last <= self.least:",
    ): "of two equal numbers either is the least",
    (
        "schedulers/vllm/connector.py",
        "self._last: tuple[int, set[Request]] = (0, set())",
        "self._last: tuple[int, set[Request]] = (1, set())",
    ): "no batch is in flight before the first step, which sets it",
    (
        "headway/planning/verdict.py",
        "longest = max((float(run.get('p99_e2el_ms', 0)) for run in trial.runs)) "
        "if trial.ok else 0.0",
        "longest = max((float(run.get('p99_e2el_ms', 0)) for run in trial.runs)) "
        "if trial.ok else 1.0",
    ): "a few times a millisecond is less than any run's least seconds",
    (
        "simulation/stream.py",
        "check_done(self.done, fed)",
        "pass",
    ): "it asserts that no engine loses a request",
    (
        "cluster/data_parallel.py",
        "none: Counts = (0, 0, 0.0)",
        "none: Counts = (0, 1, 0.0)",
    ): "until counts are published it adds the same to the score of every rank",
    (
        "engine/client.py",
        "self._limit = self._chunk.work.max_concurrency or total + 1",
        "self._limit = self._chunk.work.max_concurrency or total + 2",
    ): "any number above that of all requests is no limit",
    (
        "core/log.py",
        "times, counts = ((-1.0, -1.0, finish), (0, 0, 0))",
        "times, counts = ((-1.0, -2.0, finish), (0, 0, 0))",
    ): "any time before 0 says that there was none",
    (
        "cluster/lifecycle.py",
        "self._ended_before = 0",
        "self._ended_before = 1",
    ): "the first failure sets it, and no failure counts before that",
    (
        "cluster/lifecycle.py",
        "want = max(want, have) if quotient > 1.0 else want",
        "want = max(want, have) if quotient >= 1.0 else want",
    ): "a quotient of 1 is within the tolerance, and does not come here",
    (
        "cluster/lifecycle.py",
        "if abs(quotient - 1.0) > TOLERANCE and up:",
        "if abs(quotient - 1.0) >= TOLERANCE and up:",
    ): "0.1 in binary is no difference of 1 and another number: it has three digits too many",
    (
        "costs/piecewise.py",
        "longest = end if end > longest else longest",
        "longest = end if end >= longest else longest",
    ): "of two equal numbers either is the larger",
    (
        "costs/piecewise.py",
        "seconds = fixed + prefill + (work if work > serial else serial)",
        "seconds = fixed + prefill + (work if work >= serial else serial)",
    ): "of two equal numbers either is the larger",
    (
        "costs/piecewise.py",
        "counts = np.arange(min(len(self._dense), MAX_TABLE_SEQUENCES + 1), dtype=np.int64)",
        "counts = np.arange(min(len(self._dense), MAX_TABLE_SEQUENCES - 1), dtype=np.int64)",
    ): "beyond the table the same is computed",
    (
        "schedulers/base.py",
        "if most and most < room:",
        "if most and most <= room:",
    ): "a limit equal to the room is the room",
    (
        "diagnosis/rules.py",
        "lost = run.share('preempted_time', 'recompute_time', 'swap_time')",
        "lost = run.share('recompute_time', 'preempted_time', 'swap_time')",
    ): "their sum is the same to the last bit: the first two are added to 0, in either order",
    (
        "headway/runs/explain.py",
        "needed += ['tpot'] if (row['output_tokens'] or 0) > 1 else []",
        "needed += ['tpot'] if (row['output_tokens'] or 1) > 1 else []",
    ): "an empty cell, or 0, is no number above 1 either way",
    (
        "simulation/partitions.py",
        "np.savez(file, allow_pickle=False, **cast(Any, sums))",
        "np.savez(file, allow_pickle=True, **cast(Any, sums))",
    ): "sums are arrays of numbers and of text, which are never pickled",
    (
        "schedulers/vllm/dynamic.py",
        "self._arrivals = 0",
        "self._arrivals = 1",
    ): "only whether the number has changed counts",
    (
        "headway/planning/theory.py",
        "return sorted({*np.geomspace(1, most, count).astype(int).tolist()})",
        "return sorted({*np.geomspace(most, 1, count).astype(int).tolist()})",
    ): "the same numbers from either end, of 24 and of 30 points, up to 20,000",
    (
        "policies/fair.py",
        "account.entry = -1",
        "account.entry = -2",
    ): "any number below 0 says that no entry is valid",
    (
        "schedulers/sglang/scheduler.py",
        "self._resets_full = False",
        "self._resets_full = True",
    ): "no batch is full before the first pass",
    (
        "engine/replica.py",
        "self._due = -1.0",
        "self._due = -2.0",
    ): "any time below 0 says that there is nothing to wait for",
    (
        "schedulers/vllm/scheduler.py",
        "if left < 0:",
        "if left <= 0:",
    ): "a walk finds the same, more slowly",
    (
        "schedulers/trtllm.py",
        "if need > free or self._is_overtaken():",
        "if need >= free or self._is_overtaken():",
    ): "where blocks just suffice sharing out finds that all fit, and has none for prompts either",
    (
        "costs/piecewise.py",
        "table = np.array([self._decode_seconds(n) for n in "
        "range(int(counts.max(initial=0)) + 1)])",
        "table = np.array([self._decode_seconds(n) for n in "
        "range(int(counts.max(initial=1)) + 1)])",
    ): "a table may have a row that nobody reads",
    (
        "costs/piecewise.py",
        "launched = (counts > self._largest_graph) & bool(self.launch)",
        "launched = (counts > self._largest_graph) | bool(self.launch)",
    ): "where the table tells nothing `leap` computes the same, more slowly",
    (
        "schedulers/vllm/scheduler.py",
        "if request.admission + 1 != running.admissions and running.decodes_behind(request):",
        "if request.admission - 1 != running.admissions and running.decodes_behind(request):",
    ): "`decodes_behind` finds nobody behind the last admitted, either",
    (
        "schedulers/static.py",
        "request.first_token = -1.0",
        "request.first_token = -2.0",
    ): "any time below 0 says that there was none",
    (
        "diagnosis/advice.py",
        "used = percentiles(tokens, [99.0])[0]",
        "used = percentiles(tokens, [99.0])[-1]",
    ): "of one percentile the first is the last",
}
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (file if file.startswith("headway/") else f"simulator/{folder}{file}", old, new): reason
    for folder, table in (("kv_cache/", KV_CACHE), ("", OTHERS))
    for (file, old, new), reason in table.items()
}
