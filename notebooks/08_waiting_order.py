# %% [markdown]
# # Which waiting order for vLLM?
#
# vLLM's tracker has proposals to change which request is admitted next, or preempted: shortest prompt
# first (29406), least left to compute after what is cached (51375), most cached first (42185), and
# the request that has computed least as the victim (54644). Each comes with figures of its author's
# traffic. This page compares all of them with first come, first served on the same traffic.
#
# **What was run.** `python benchmarks/waiting_orders.py` replayed Azure's traces of 2023
# (conversations and code; Azure/AzurePublicDataset, CC-BY-4.0), Mooncake's conversations of FAST'25
# (kvcache-ai/Mooncake, Apache-2.0), and bursty traffic of 20 clients like BurstGPT's, which is drawn.
# It wrote `benchmarks/waiting_orders.csv`: figures of 900 runs, no requests. Llama-3.1-8B on one A100
# under `engine: vllm`, with 9,000 KV blocks as a card of 40 GB leaves; Mooncake with the 27,000 of 80
# GB and, `mooncake-ample`, with 100,000, which no single card has. Ten windows of each trace (of
# Mooncake's ten sixteenths of the conversations, of the drawn traffic ten seeds), three loads: shares
# of the rate that the engine gets through when all requests come at once.

# %%
# %matplotlib inline
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from headway.planning.intervals import holm, paired
from headway.testing import check_policy

BENCHMARKS, EXAMPLES = Path("../benchmarks"), Path("../scenarios/examples")
runs = pd.read_csv(BENCHMARKS / "waiting_orders.csv")
WORKLOADS, LOADS = list(runs.workload.unique()), runs.load.unique().tolist()
POLICIES = [policy for policy in runs.policy.unique() if policy != "fcfs"]
f"{len(runs)} runs of {', '.join(WORKLOADS)}; loads {LOADS}"

# %% [markdown]
# ## The orders, as policies
#
# `scenarios/examples/vllm_proposals.py` has them, each of up to 40 lines. `check_policy` tries each on
# a hundred small engines: it ends every request, leaks no block and does not know the length of an
# answer.

# %%
sys.path.insert(0, str(EXAMPLES))
for policy in ("ResidualSJF", "CacheAffinity", "LeastComputedVictim"):
    check_policy(f"vllm_proposals:{policy}")

# %% [markdown]
# ## TTFT, paired
#
# Windows differ more than policies do. So each window is compared with itself: the ratio of a
# policy's mean TTFT to that of fcfs, its geometric mean over the ten windows, and the 95 % interval of
# that (Student's t of the logarithms).
#
# Each of the tables below has 72 such ratios. Three or four of 72 intervals at 95 % miss 1 though
# there is no difference. A star marks the ratios that Holm's test, over all 72 of a table, finds different
# from 1 (p < 0.05). An interval beside 1 without a star is a hint, no finding.


# %%
def ratios(metric):
    """Ratio to fcfs by workload, load and policy, with its interval and Holm's p value."""
    table = runs.pivot_table(metric, ["workload", "load", "policy"], "window", sort=False)
    rows = []
    for workload in WORKLOADS:
        for load in LOADS:
            first = np.log(table.loc[workload, load, "fcfs"]).tolist()
            for policy in POLICIES:
                other = np.log(table.loc[workload, load, policy]).tolist()
                found = paired(metric, first, other)
                low, high = np.exp(found.difference.interval)
                rows.append(
                    (workload, load, policy, np.exp(found.difference.mean), low, high, found.p)
                )
    columns = ["workload", "load", "policy", "ratio", "low", "high", "p"]
    frame = pd.DataFrame(rows, columns=columns).set_index(columns[:3])
    frame["significant"] = np.array(holm(frame.p.tolist())) < 0.05
    return frame.drop(columns="p").sort_index()


HUES = ("#56b4e9", "#0072b2", "#d55e00")


def draw(metric, title):
    """A panel for each workload, a row for each policy, a mark for each load."""
    frame = ratios(metric)
    figure, panels = plt.subplots(
        2, 3, figsize=(11, 5), sharex=True, sharey=True, layout="constrained"
    )
    for panel, workload in zip(panels.flat, WORKLOADS, strict=True):
        for i, load in enumerate(LOADS):
            part = frame.loc[workload, load].loc[POLICIES]
            places = np.arange(len(POLICIES)) + (i - 1) * 0.22
            ends = [part.ratio - part.low, part.high - part.ratio]
            panel.errorbar(
                part.ratio, places, xerr=ends, fmt="o", color=HUES[i], label=f"load {load}", ms=4
            )
        panel.axvline(1, color="0.35", lw=0.8)
        panel.set_title(workload, fontsize=10)
        panel.set_xscale("log")
        panel.grid(axis="x", color="0.9", which="both")
        panel.spines[["top", "right"]].set_visible(False)
    panel.set_yticks(range(len(POLICIES)), POLICIES)
    panel.invert_yaxis()
    ticks = [0.2, 0.5, 1, 2, 5]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.xaxis.minorticks_off()
    figure.supxlabel(f"{title}, as a ratio to fcfs (less is better)", fontsize=10)
    figure.legend(
        *panel.get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False
    )
    plt.show()
    return frame


mean = draw("mean_ttft_s", "mean TTFT")

# %%
p99 = draw("p99_ttft_s", "P99 of TTFT")


# %%
def table(frame):
    """Ratios with their intervals; a star where Holm's test over all 72 finds a difference."""
    words = [
        f"{row.ratio:.2f} [{row.low:.2f}, {row.high:.2f}]{'*' if row.significant else ''}"
        for row in frame.itertuples()
    ]
    return pd.Series(words, frame.index).unstack("policy").loc[WORKLOADS, POLICIES]


table(mean)

# %%
table(p99)

# %%
table(ratios("mean_e2el_s"))

# %% [markdown]
# **Shortest prompt first** lowers the mean wherever there is a queue: to 0.4 of it on code at all
# loads, to 0.2 on Mooncake beyond saturation, where it multiplies the P99 by five on Azure's
# conversations. **Least left to compute**, with its limit of 10 s, is the milder of the two: a third off
# on code, nothing lost in the P99. But once everybody waits for more than 10 s everybody has reached the
# limit, and it is first come, first served. **Most cached first** does nothing where prompts share
# nothing (Azure, the drawn traffic), much where the cache is too small for all conversations, and little
# where it is ample. **The least-computed victim** changes nothing that ten windows could show.
#
# ## Which requests pay?
#
# The same requests came under fcfs, so it is known how much earlier or later each got its first
# token. Traces name no clients, so tenths by length of prompt take their place; the drawn traffic has its 20
# clients. The worst group is the one whose mean TTFT rises most.

# %%
loaded = runs[(runs.load == 1.1) & (runs.policy != "fcfs")]
before = runs[(runs.load == 1.1) & (runs.policy == "fcfs")].set_index(["workload", "window"])
harm = loaded.groupby(["workload", "policy"], sort=False).agg(
    harmed=("harmed_share", "mean"),
    worst_group=("worst_group_ratio", "mean"),
    longest_tenth_s=("ttft_longest_tenth_s", "mean"),
    max_ttft_s=("max_ttft_s", "mean"),
    max_ttft_worst_window_s=("max_ttft_s", "max"),
)
at_fcfs = before.groupby("workload", sort=False)[["ttft_longest_tenth_s", "max_ttft_s"]].mean()
harm["longest_tenth_fcfs_s"] = harm.index.get_level_values(0).map(at_fcfs.ttft_longest_tenth_s)
harm["max_ttft_fcfs_s"] = harm.index.get_level_values(0).map(at_fcfs.max_ttft_s)
harm["harmed"] = (100 * harm.harmed).round(1).astype(str) + " %"
harm.round(1)

# %%
figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
for i, policy in enumerate(POLICIES):
    gain, worst = [], []
    for workload in WORKLOADS:
        gain.append(mean.ratio[workload, 1.1, policy])
        part = loaded[(loaded.workload == workload) & (loaded.policy == policy)]
        worst.append(np.exp(np.log(part.worst_group_ratio).mean()))
    panel.plot(
        gain, worst, "osD^"[i], color=("#0072b2", "#d55e00", "#009e73", "#b8558f")[i], label=policy
    )
panel.axhline(1, color="0.35", lw=0.8)
panel.axvline(1, color="0.35", lw=0.8)
panel.set(
    xlabel="mean TTFT of all, ratio to fcfs", ylabel="of the group hurt most, ratio", yscale="log"
)
panel.set_yticks([0.8, 1, 1.5, 2, 3, 5], ["0.8", "1", "1.5", "2", "3", "5"])
panel.yaxis.minorticks_off()
panel.set_title(
    "What all gain and what one group pays, load 1.1, a mark for each workload", fontsize=10
)
panel.legend(frameon=False)
panel.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Long prompts pay for shortest first. The longest tenth of Azure's conversations beyond saturation
# waits five times as long as under fcfs; on Mooncake somebody waits for 14 minutes. On code the longest
# tenth waits twice as long. The limit of 10 s keeps the worst group at 1.0 to 1.5 times. Most cached first starves the cold: with an ample cache, at load 1.1, a fifth of the requests
# gets its first token more than 10 s later than under fcfs.
#
# ## The victims
#
# The least-computed victim is to save what is computed again. Under KV pressure (`bursty-long`, 1.1):

# %%
pressed = runs[(runs.workload == "bursty-long") & (runs.load == 1.1)]
columns = ["preemptions", "prefill_tokens", "output_tok_s", "mean_e2el_s"]
pressed.groupby("policy", sort=False)[columns].mean().loc[["fcfs", "least-computed"]].round(1)

# %% [markdown]
# It preempts twice as often, since the request that has computed least frees the fewest blocks, and computes no fewer
# tokens. The proposal measured 10 to 23 % of computation lost to preemption, and half of that to the
# choice of the victim. Here a quarter is lost, and the choice saves none of it. Since 0.19 vLLM admits a
# prompt only when its blocks are free; on Azure's traces preemptions are rare since.
#
# ## How long a limit?
#
# The limit of 10 s decides what least-left-to-compute is. The same `bursty` traffic at load 1.1 under other
# limits: at 0 it is first come, first served, and at 10 these are the runs of above.

# %%
sys.path.insert(0, str(BENCHMARKS))
from waiting_orders import WINDOWS, bursty, simulate

rows = []
for seed in range(WINDOWS):
    load = bursty(seed, 200)
    together = simulate(replace(load, arrival=np.zeros(len(load))), 9000, "fcfs")
    seconds = together.summary()["duration"]
    start = load.arrival - load.arrival[0]
    load = replace(load, arrival=start * (seconds / 1.1 / start[-1]))
    for limit in (0, 1, 3, 10, 30, 100, 1000):
        policy = f'{{policy: "vllm_proposals:ResidualSJF", max_wait: {limit}}}'
        ttft = simulate(load, 9000, policy).requests.ttft
        rows.append((limit, seed, ttft.mean(), ttft.quantile(0.99), ttft.max()))
limits = pd.DataFrame(rows, columns=["max_wait", "seed", "mean", "P99", "max"])
limits = limits.set_index(["max_wait", "seed"])
to_fcfs = np.exp(np.log(limits / limits.loc[0]).groupby("max_wait").mean())
figure, panel = plt.subplots(figsize=(7, 3.4), layout="constrained")
for i, word in enumerate(to_fcfs):
    panel.plot(range(len(to_fcfs)), to_fcfs[word], "o-", color=HUES[i], label=word)
panel.axhline(1, color="0.35", lw=0.8)
panel.set_xticks(range(len(to_fcfs)), [f"{limit:,}" for limit in to_fcfs.index])
panel.set(xlabel="max_wait, s (0: first come, first served)", ylabel="TTFT, ratio to fcfs")
panel.set_ylim(bottom=0)
panel.grid(axis="y", color="0.9")
panel.spines[["top", "right"]].set_visible(False)
panel.legend(frameon=False, ncols=3)
plt.show()
to_fcfs.round(2)

# %% [markdown]
# Ten ratios and their geometric mean, as above. The effect of a limit depends on how long the queue is. The
# seconds of each seed (columns) show it:

# %%
limits["mean"].unstack("seed").round(2)

# %%
limits["P99"].unstack("seed").round(1)

# %% [markdown]
# Ten seconds take a third off the mean (0.66, as in the table above), 30 s nearly half, no limit half. In
# seven of ten windows a limit of 30 s is as good as none, since hardly anybody waits so long. In seed 5
# everybody waits: under first come, first served 16.6 s in the mean. There 10 s change nothing, 30 s give
# 9.8 s; without a limit it is 4.7 s, and the P99 is 144 s instead of 29.
#
# ## What follows, and what does not
#
# - No order matters without a queue. At load 0.7 only bursts queue. There the mean TTFT changes by 4 % on
#   Azure's conversations and with long answers, by a tenth on bursty traffic, and by more where prompts
#   differ much in length: shortest first has 0.41 of it on code, 0.69 on Mooncake.
# - If what counts is the mean TTFT, and short prompts are most of the traffic, least-left-to-compute with
#   a limit is the safe one of these. The limit should be about the longest wait that you would defend; if
#   queues get longer than that it buys nothing, and more GPUs do.
# - Shortest first without a limit starves long prompts as soon as the load passes what the engine can do,
#   on code already at load 0.7.
# - Order by cache only if prompts share prefixes, the cache is too small for them, and somebody bounds the
#   wait of the cold.
# - There is no case here for another victim.
#
# **Limits.** One model, one GPU, one cost profile; windows of some 700 to 1,500 requests that begin with
# a cold cache and an empty engine. A load of 1.1 lasts as long as a window; had it lasted longer, waits
# would be longer. Loads are made by stretching time, which keeps bursts in proportion. Tenths by length
# are no clients. The policies follow the descriptions of the proposals, not their code. Ten windows show a
# difference of some percent, not one of a thousandth; intervals are of these traces' hours, not of yours.
