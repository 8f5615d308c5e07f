"""What stands out in a run: rules that name figures, and which keys to turn, where to.

Each rule is a function of the evidence in a run; it gives a finding or None. The weight of a
finding, 0 to 1, is about the share of the requests' time (or of the work) that is at stake, and
orders them; requests that were lost come before all that were late. What a finding advises never
contradicts one before it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from simulator.diagnosis.advice import AdvisedEvidence
from simulator.diagnosis.encoder import encoder
from simulator.diagnosis.evidence import ADAPTERS, KV_BLOCKS, MAX_NUM_SEQS, POLICY, TOKEN_BUDGET
from simulator.diagnosis.finding import Advice, Finding, turn, words
from simulator.diagnosis.fleet_rules import (
    autoscaling,
    explained,
    failures,
    kv_transfer,
    pools,
    routing,
    scattered_prefixes,
)
from simulator.diagnosis.levels import BROKEN, HOST, levels
from simulator.diagnosis.losses import rejected, tries
from simulator.diagnosis.memory_advice import MOST
from simulator.diagnosis.prefixes import forgotten_prefixes, prefix_reuse
from simulator.results.breakdown import prompt_rows
from simulator.results.fairness import Clients, several_clients
from simulator.results.record import Record
from simulator.results.service_levels import Judged, three_digits

Rule = Callable[[AdvisedEvidence], Finding | None]

SHOWN = 4  # findings that a report prints
NOTHING = "No finding: no knob needs turning."
KEPT = "All service levels are kept: nothing needs turning."
GROWS = "All service levels are kept so far, but a queue grows: in a longer run they break."
CLOSE = "All service levels are kept, but within the error of the step times: {}."

TTFT, E2EL = "p99_ttft_ms", "p99_e2el_ms"

WAITING = 0.05  # share of the requests' time that one cause of waiting must take
PREEMPTED = 0.01  # preemptions per request
STALLED = 0.2  # share of the decoding time that prompts add
WASTED = 0.1  # share of the token slots that nobody needs
UNFAIR = 0.25  # share of a client's waiting in which another gets more than a fair policy gives
LOW_LOAD = 2.0  # requests that run at once


def diagnose(record: Record, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what the rules find in a run with this summary, most important first.

    Each finding is a dict with `rule`, `weight` (0 to 1), `text`, `metric` (a key of the summary),
    `advice` (the best first: dicts of `direction`, `key`, `from`, `to` and maybe `also`, further
    keys), `knob` (the same in words) and `figures`, rounded to four digits.
    """
    run = AdvisedEvidence(record, summary)
    if not len(run.done):
        return []
    if not run.done.any():  # the others look at requests that were served
        lost = [*_found(run, (rejected, tries))] or _found(run, (levels,))  # which follows from it
        return [_as_dict(name, one, one.advice) for name, one in lost]
    found = [*_found(run, RULES)]
    taken_off = 1 - explained(run)
    found = [
        (name, one if name in FLEET else one._replace(weight=taken_off * one.weight))
        for name, one in found
    ]
    weights = {name: one.weight for name, one in found if one.advice}
    for at, (name, one) in enumerate(found):
        before = (weights.get(other, 1.0) for other in BEHIND.get(name, ()))
        found[at] = name, one._replace(weight=min(one.weight, *before, 1.0))
    found.sort(key=lambda pair: (pair[0] not in LOST, -pair[1].weight))
    taken = _taken(advice for _, one in found for advice in one.advice)
    notes = [one for spec in record.specs.values() for one in spec.notes if "not start" in one]
    if notes and not any(one.advice or name in SAID for name, one in found):
        told = f"The server would not start: {notes[0].rpartition('; ')[2]}."
        found.insert(0, ("server", Finding(1.0, told, E2EL, ())))
    findings = [(name, finding, _agreeing(finding, taken)) for name, finding in found]
    return [_as_dict(*one) for one in findings if one[-1] or one[0] in SAID]


def _found(run: AdvisedEvidence, rules: Iterable[Rule]) -> Iterator[tuple[str, Finding]]:
    """Yield each rule that finds something, and that, with advice that the scenario can follow."""
    takes = cache(run.takes)  # most rules advise the same
    for rule in rules:
        if (one := rule(run)) is not None:
            yield rule.__name__, one._replace(advice=[*filter(takes, one.advice)])


def _taken(advice: Iterable[Advice]) -> dict[str, Advice]:
    """Return one value for each key: the first, but of replicas as many as any finding needs.

    Of equal numbers the one that says which other keys change with it.
    """
    taken: dict[str, Advice] = {}
    for one in advice:
        first = taken.setdefault(one.key, one)
        if one.key.endswith(".replicas") and one.direction == first.direction == "raise":
            taken[one.key] = max(first, one, key=lambda each: (each.to, len(each.also)))
    return taken


def _agreeing(finding: Finding, taken: Mapping[str, Advice]) -> list[Advice]:
    """Return the advice that agrees with what has been `taken`."""
    agreed = (
        taken[one.key]
        for one in finding.advice
        if taken[one.key].direction == one.direction != "set" or taken[one.key].to == one.to
    )
    return list(dict.fromkeys(agreed))


def _as_dict(name: str, finding: Finding, advice: Sequence[Advice]) -> dict[str, Any]:
    """Return a finding as summary.json has it."""
    figures = {
        key: float(f"{value:.4g}") if isinstance(value, float) else value
        for key, value in finding.figures.items()
    }
    told = [one.as_dict() for one in advice]
    return {
        "rule": name,
        "weight": round(min(finding.weight, 1.0), 3),
        "text": finding.text,
        "metric": finding.metric,
        "advice": told,
        "knob": ", or ".join(map(words, told)),
        "figures": figures,
    }


def told_findings(gauges: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return of each finding what a reader is told: its text, and the knob or "".

    `gauges` is what stands under `headway` in a summary. Where the run keeps its service levels,
    that is all, beside a knob that saves replicas; a level that is close has the others' texts.
    """
    met = bool(gauges.get("slo_met"))
    grows = gauges.get("stationary") is False and (gauges.get("trend_per_s") or 0.0) > 0
    kept = met and not grows
    levels = [(Judged.of(one), one["met"]) for one in gauges.get("slo") or ()]
    close = [f"{one.slo.text} is {one}" for one, _ in levels if kept and one.close]
    findings = gauges.get("diagnosis") or ()
    saves = [one["rule"] == "low_load" for one in findings]
    found = [
        (str(one["text"]), "" if kept and not fewer else str(one["knob"]))
        for one, fewer in zip(findings, saves, strict=True)
        if close or fewer or not kept
    ]
    if all(one["rule"] != "levels" for one in findings):  # a run that kept no requests has none
        found += [(f"{BROKEN}{one.slo.text} is {one}.", "") for one, good in levels if not good]
    if met and grows:
        return [(GROWS, ""), *found]
    if close:
        return [(CLOSE.format("; ".join(close)), ""), *found]
    return [(KEPT, ""), *found] if kept and findings else found


def diagnosis_lines(gauges: Mapping[str, Any]) -> list[str]:
    """Return the lines that a report prints."""
    found = told_findings(gauges)
    shown = found[: SHOWN + bool(gauges.get("slo_met"))]
    shown += [one for one in found if one not in shown and one[0].startswith(BROKEN)]
    return [f"- {text}" + f"\n  Knob: {knob}." * bool(knob) for text, knob in shown] or [NOTHING]


def memory(run: AdvisedEvidence) -> Finding | None:
    """Requests wait because their KV blocks do not fit."""
    share = run.wait_shares[KV_BLOCKS]
    if share < WAITING:
        return None
    running = run.gauges["mean_running"]
    kept = [f"{name} ({now:g})" for name, now in run.advisor.kept_free.items()]
    held = f" Admission keeps blocks free: {', '.join(kept)}." if kept else ""
    if run.advisor.reserves_all:
        longest = int(run.record.workload.output_tokens.max())
        held += (
            " No request has max_tokens, so room for an answer of any length is reserved; the "
            f"longest has {longest:,} tokens."
        )
    return Finding(
        share * (1 - run.misrouted),
        f"KV memory limits the batch: for {run.memory_time:.0%} of the busy time requests wait "
        f"for blocks, {running:.1f} of {run.limit('max_num_seqs')} seats taken on average; that "
        f"wait is {share:.0%} of the requests' time.{held}",
        TTFT
        if run.share("queue_time") >= run.share("preempted_time", "decode_queue_time")
        else E2EL,
        run.advisor.cure(KV_BLOCKS),
        {"share_of_e2el": share, "share_of_busy_time": run.memory_time},
    )


def waiting(run: AdvisedEvidence) -> Finding | None:
    """Requests wait though there is memory: for seats, for the token budget, by the policy."""
    cause = max((MAX_NUM_SEQS, TOKEN_BUDGET, POLICY), key=lambda name: run.wait_shares[name])
    share = run.wait_shares[cause]
    if share < WAITING:
        return None
    why = {
        MAX_NUM_SEQS: f"all max_num_seqs={run.limit('max_num_seqs')} seats are taken",
        TOKEN_BUDGET: "a step computes max_num_batched_tokens="
        f"{run.limit('max_num_batched_tokens')} tokens at most, while on average "
        f"{run.gauges['mean_running']:.1f} of {run.limit('max_num_seqs')} seats are taken",
        POLICY: f"{run.policy} admits no request then",
    }[cause]
    advice = run.advisor.cure(cause)
    cost = "" if run.gauges.get("slo_met") else run.advisor.cost_of_budget(advice)
    return Finding(
        share * (1 - run.misrouted),
        f"Requests wait for {share:.0%} of their time because {why} (mean wait in the queue "
        f"{three_digits(run.ms('mean_queue_time') / 1000)} s, for all reasons; GPU busy "
        f"{run.gauges['gpu_busy_fraction']:.0%}).{cost}",
        TTFT,
        advice,
        {"cause": cause, "share_of_e2el": share},
    )


def urgent(run: AdvisedEvidence) -> Finding | None:
    """Urgent requests wait while less urgent ones keep their seats and blocks."""
    priority = run.record.workload.priority
    if priority is None or not (better := run.advisor.one_class_first()):
        return None
    first = run.done & (priority == priority.min())
    waited, whole = (float(x[first].sum()) for x in (run.table.queue_time, run.table.e2el))
    held = run.wait_shares[MAX_NUM_SEQS] + run.wait_shares[KV_BLOCKS]
    if not whole or first.all() or waited < WAITING * whole or held < WAITING:
        return None
    return Finding(
        waited / whole,
        f"Requests of priority {priority.min()} wait for {waited / whole:.0%} of their time, "
        f"{three_digits(waited / first.sum())} s on average, while less urgent ones run: policy "
        f"{run.policy} displaces none of them.",
        TTFT,
        better,
        {"priority": int(priority.min()), "share_of_their_e2el": waited / whole},
    )


def host(run: AdvisedEvidence) -> Finding | None:
    """The GPU waits for the host."""
    share = run.gauges.get("host_share") or 0.0
    if share < HOST:
        return None
    return Finding(
        share * (1.0 - sum(run.wait_shares.values())),
        f"The GPU waits for the host in {share:.0%} of the steps' time.",
        "output_throughput",
        run.advisor.host(),
    )


def preemption(run: AdvisedEvidence) -> Finding | None:
    """Requests are thrown out, and what that costs."""
    gauges, rate = run.gauges, run.gauges["preemption_rate"]
    if rate < PREEMPTED:
        return None
    again = sum(int(log.pauses["recomputed"].sum()) for log in run.record.logs)
    copied = round(gauges["swapped_bytes"])
    lost = run.share("preempted_time", "recompute_time", "swap_time")
    part = again / max(gauges["prefill_tokens"], 1)
    costs = [f"{again:,} tokens ({part:.0%} of prefill) computed again"] if again else []
    costs += [f"{three_digits(copied / 1e9)} GB of KV cache copied"] if copied else []
    # Where others wait for blocks, too, smaller batches would let them wait longer.
    fewer = run.advisor.fewer_seats() if run.wait_shares[KV_BLOCKS] < WAITING else []
    return Finding(
        max(lost, part),
        f"{gauges['preemptions']:,} preemptions, {rate:.2f} per request: "
        f"{', '.join([*costs, ''])}{lost:.1%} of the requests' time.",
        "preemptions",
        [*run.advisor.memory(), *fewer, *run.advisor.replicas()],
        {
            "recomputed_tokens": again,
            "share_of_prefill_tokens": part,
            "share_of_e2el": lost,
        },
    )


def prefill_stalls(run: AdvisedEvidence) -> Finding | None:
    """Prompts in the same steps make decodes wait."""
    slowed, alone = run.time["decode_slowed_time"], run.time["decode_alone_time"]
    share = slowed / (slowed + alone) if slowed else 0.0
    if share < STALLED:
        return None
    step, less = _mixed_steps(run)
    kept = run.gauges.get("slo_attainment_tpot")
    though = "" if kept is None else f"; {kept:.1%} of the requests keep the bound on TPOT"
    advice = run.advisor.smaller_chunks()
    cost = "" if run.gauges.get("slo_met") else run.advisor.cost_of_budget(advice)
    return Finding(
        run.share("decode_slowed_time"),
        f"Prompts make up {share:.0%} of the time between tokens: a step with prompts takes "
        f"{three_digits(step * 1e3)} ms where its decodes alone would take "
        f"{three_digits(less * 1e3)} ms; P99 ITL {three_digits(run.ms('p99_itl'))} ms{though}."
        f"{cost}",
        "p99_itl_ms",
        advice,
        {
            "share_of_decode_time": share,
            "share_of_e2el": run.share("decode_slowed_time"),
            "mean_step_with_prompts_ms": step * 1e3,
            "mean_of_its_decodes_alone_ms": less * 1e3,
        },
    )


def _mixed_steps(run: AdvisedEvidence) -> tuple[float, float]:
    """Return the mean seconds of steps with prompts and decodes, and of their decodes alone."""
    time = stall = 0.0
    count = 0
    for log, cost in zip(run.record.logs, run.record.costs, strict=True):
        rows = prompt_rows(log)
        mixed = log.steps["decodes"][rows] > 0
        time += float((log.steps["end"][rows] - log.steps["start"][rows])[mixed].sum())
        stall += float(run.prompt_stalls(log, cost)[mixed].sum())
        count += int(mixed.sum())
    return (time / count, (time - stall) / count) if count else (0.0, 0.0)


def adapters(run: AdvisedEvidence) -> Finding | None:
    """Requests wait for others to be done with their adapters, or for adapters to be loaded."""
    waited = run.wait_shares[ADAPTERS]
    loading = run.gauges.get("adapter_loading_time", 0.0)
    busy = run.gauges["gpu_busy_fraction"] * run.summary["duration"] * run.gauges["replicas"]
    loaded = loading / busy if busy else 0.0
    if max(waited, loaded) < WAITING:
        return None
    names = len({*(run.record.workload.model or ())} - {""})
    slots, host = run.engine.max_loras, run.engine.cpu_loras
    advice = []
    if waited >= WAITING and slots < names:
        to = min(MOST * slots, names)
        advice.append(run.advisor.changed("max_loras", to, max_cpu_loras=max(host, to)))
    if loaded >= WAITING and host < names:
        advice.append(run.advisor.changed("max_cpu_loras", names))
    return Finding(
        max(waited, loaded) * (1 - run.misrouted),
        f"Requests wait for {waited:.0%} of their time because others run with max_loras="
        f"{run.limit('max_loras')} adapters; {loaded:.0%} of the busy time goes to loading "
        f"adapters, {run.gauges['adapters_read']:,} times from disk. Requests name {names}.",
        TTFT,
        advice,
        {"share_of_e2el": waited, "loading_share": loaded, "adapters": names},
    )


def unused_seats(run: AdvisedEvidence) -> Finding | None:
    """Padding and finished members of a static batch."""
    wasted = run.gauges["wasted_share"]
    if wasted < WASTED or run.engine.speculative_config is not None:
        return None
    return Finding(
        wasted,
        f"{100 * wasted:.3g}% of the token slots are padding or finished members of a batch that "
        "still runs: their seats serve no request.",
        TTFT,
        run.advisor.policy(),
    )


def unfair(run: AdvisedEvidence) -> Finding | None:
    """A client waits while another gets clearly more service than it."""
    if not several_clients(run.record.workload) or not (better := run.advisor.policy("fair")):
        return None
    from simulator.diagnosis.unfairness import most_underserved

    clients = Clients.of(run.record)
    names = clients.words.names
    found = most_underserved(clients)
    if found is None or found.share < UNFAIR:
        return None
    worst, best = names[found.worst], names[found.best]
    weighed = ", by weight" if (clients.weights != 1).any() else ""
    return Finding(
        found.share,
        f"Clients are served unequally: in {found.share:.0%} of the time that {worst} waits, "
        f"{best} gets more than its fair share: {three_digits(found.best_service)} tokens, while "
        f"{worst} gets {three_digits(found.service)} (an output token counts as two{weighed}).",
        "service_difference_max",
        better,
        {
            "worst_client": worst,
            "worst_service": found.service,
            "best_client": best,
            "best_service": found.best_service,
            "share_of_waiting_time": found.share,
            "time": found.time,
        },
    )


def low_load(run: AdvisedEvidence) -> Finding | None:
    """So few requests run at once that fewer replicas would do."""
    cluster, running = run.record.scenario.cluster, run.gauges["mean_running"]
    if running >= LOW_LOAD or sum(run.wait_shares.values()) >= WAITING or cluster is None:
        return None
    if not run.done.all() or run.gauges.get("slo_met") is False:  # fewer replicas lose more
        return None
    now = cluster.replicas or 1
    if cluster.groups or cluster.scalers or now == 1:
        return None
    busy = run.gauges["gpu_busy_fraction"]
    enough = cluster.in_pods(max(1, now * running * busy / LOW_LOAD))
    if enough == now:
        return None
    return Finding(
        1 - running / LOW_LOAD,
        f"The load is too low for batching to matter: {running:.2f} requests run at once while a "
        f"replica works, and it works {busy:.0%} of the time.",
        "gpu_hours",
        [turn("cluster.replicas", now, enough)],
    )


LOST = ("rejected", "tries")
SAID = (*LOST, "server", "levels", "host", "unfair")  # whether or not a key helps, or another first
BEHIND = {"unfair": ("urgent",), "prefill_stalls": ("prefix_reuse", "levels")}
"""Rules that come after others which advise something: smaller steps may cost a level of TTFT."""
FLEET = ("failures", "autoscaling")
RULES = (
    rejected,
    failures,
    autoscaling,
    routing,
    scattered_prefixes,
    tries,
    memory,
    waiting,
    urgent,
    adapters,
    encoder,
    preemption,
    kv_transfer,
    pools,
    levels,
    unused_seats,
    prefix_reuse,
    forgotten_prefixes,
    prefill_stalls,
    unfair,
    low_load,
    host,
)
