"""Requests that were lost: rejected as too large or by a full queue, or given up by clients."""

import numpy as np

from simulator.core.log import REJECTED
from simulator.diagnosis.advice import AdvisedEvidence, Advisor
from simulator.diagnosis.finding import Advice, Finding, turn
from simulator.results.request_table import RETRY
from simulator.schedulers.door import REQUESTS, TOKENS
from simulator.workload.unused import over_limits

GIVEN_UP = 0.01  # share of the requests
TRIED = 0.05  # share of the requests' time that goes to tries before the last


def rejected(run: AdvisedEvidence) -> Finding | None:
    """Requests were rejected: they exceed what the engine has, or a limit of its queue."""
    table = run.table
    refused = table.reason == REJECTED
    if not (count := int(refused.sum())):
        return None
    at = np.bincount(np.maximum(table.replica[refused], 0), minlength=len(run.record.logs))
    advisor = Advisor(run, at.tolist())
    load, longest = table.workload, advisor.spec.max_model_len
    prompt = load.prompt_tokens[refused]
    total = np.minimum(prompt + load.output_tokens[refused] - 1, longest - 1)
    blocks, size = advisor.spec.num_gpu_blocks - 1, advisor.engine.block_size
    limits = {key: getattr(advisor.engine, key) for key in (REQUESTS, TOKENS)}
    limits = {key: most for key, most in limits.items() if most is not None}
    outside = int(((prompt < longest) & (-(-total // size) <= blocks)).sum()) if limits else 0
    share, were = count / len(refused), "was" if count == 1 else "were"
    lost = f"{count:,} of {len(refused):,} requests {were} rejected ({share:.1%})"
    over, why = over_limits(load, advisor.engine)
    own, step, helps = run.own_scheduler, advisor.engine.max_num_batched_tokens, ""
    splits = own is None or not own.refuses_long or advisor.engine.enable_chunked_prefill
    beyond = prompt[(prompt > step) & (prompt < longest) & (not splits)]
    advice: list[Advice] = []
    # Where most are over limits of the model, `why` says so, and no key helps.
    if 2 * over <= count < 2 * outside:
        advice = [turn(f"engine.{key}", most, None) for key, most in limits.items()]
        which = " and ".join(f"engine.{key} ({most:,})" for key, most in limits.items())
        why = f"{outside:,} by {which}, limits of the queue (503)"
    elif 2 * over <= count < 2 * len(beyond):
        top = int(beyond.max())
        split = turn(advisor.key("enable_chunked_prefill"), False, True)
        advice = [advisor.changed("max_num_batched_tokens", top), split]
        why = f"the longest prompt has {top:,} tokens, and a step of unsplit prompts {step:,}"
    elif 2 * over <= count:
        long = 2 * int((prompt >= longest).sum()) > count
        needs = f"{total.max():,} tokens, {-(-int(total.max()) // size):,} KV blocks"
        why = f"the largest has {needs}; there are {max(blocks, 0):,}"
        if long:
            why = f"the longest prompt has {prompt.max():,} tokens, max_model_len is {longest:,}"
        advice = advisor.room(int(prompt.max()) if long else 0, int(total.max()))
        most = advisor.spec.model.longest(advisor.spec.release)
        if not advice:
            helps = " No single key makes room for them: take larger GPUs, or more."
        if int(prompt.max()) >= most:
            helps = (
                f" The model takes {most:,} tokens: no key and no GPU lets it read longer prompts."
            )
    return Finding(share, f"{lost}: {why}.{helps}", "completed", advice)


LOST_TRIES = {
    "refused_tries": "refused at the door",
    "timed_out_tries": "timed out",
    "tries_lost_in_failures": "lost with a replica",
}
"""Why tries come to nothing, in words."""


def tries(run: AdvisedEvidence) -> Finding | None:
    """Requests are given up by their clients, or it takes several tries to serve them."""
    cluster = run.gauges.get("cluster", {})
    total = len(run.table.sent)
    gone = cluster.get("shed", 0) + cluster.get("timed_out", 0)
    lost, share = gone / total, run.share(RETRY)
    if lost < GIVEN_UP and share < TRIED:
        return None
    what = ", ".join(
        f"{cluster[name]:,} {word}" for name, word in LOST_TRIES.items() if cluster[name]
    )
    text = f"{gone:,} of {total:,} requests were given up ({lost:.1%}). " if gone else ""
    of = f" are {share:.0%} of the time of the requests served" if share >= TRIED else ""
    text += f"Failed tries: {what}{of}."
    return Finding(
        max(lost, share),
        text,
        "completed" if gone else "mean_e2el_ms",
        run.advisor.replicas(),
        {"share_of_requests": lost, "share_of_e2el": share},
    )
