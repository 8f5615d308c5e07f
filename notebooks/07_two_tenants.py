# %% [markdown]
# # Two tenants on traffic like Azure's and Mooncake's
#
# A chat and a batch tenant share a GPU. `client-0` sends a fifth of the requests, `client-1` the
# rest. Who waits for whom, under `fcfs`, `priority`, `preemptive`, `fair` and `wfq`?
#
# **What is real here, and what is made up.** Rates, burstiness and lengths are those of two
# published traces, Azure's conversations of 2023 and Mooncake's of FAST'25, as quantiles in
# `scenarios/what-if/`. The requests are drawn from them, so that this notebook says the same on
# every machine. The clients and their priorities are made up: neither trace has any. With the
# traces in `HEADWAY_DATA` (`docs/workloads.md`) set `REAL = True` to replay them; the clients are
# made up then, too.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from simulator import load_scenario, run

REAL = False
TENANTS = "clients: [1, 4], priorities: [0, 1]"  # smaller is more urgent
TRACES = {
    "azure": "{path: traces/azure_llm_2023_conv.csv.gz, limit: 6000, rate_scale: 1.25}",
    "mooncake": "{path: traces/mooncake_fast25_conversation.jsonl.gz, limit: 2500, rate_scale: 0.3}",
}
POLICIES = ("fcfs", "priority", "preemptive", "fair", "wfq")


def simulate(name, policy):
    settings = [f"engine.scheduling_policy={policy}"]
    if REAL:
        settings.append(f"workload={{trace: {TRACES[name]}, {TENANTS}}}")
    return run(load_scenario(f"../scenarios/what-if/{name}-tenants.yaml", settings))


def table(results):
    rows = {}
    for policy, result in results.items():
        summary = result.summary()
        ttft = result.requests.groupby("client", observed=True)["ttft"]
        rows[policy] = {
            f"{what} TTFT of {client} (s)": value
            for what, values in (("mean", ttft.mean()), ("P99", ttft.quantile(0.99)))
            for client, value in sorted(values.items())
        } | {
            "preemptions": summary["headway"]["preemptions"],
            "output tokens/s": summary["output_throughput"],
        }
    return pd.DataFrame(rows).T.round(1)


# %% [markdown]
# ## Azure's conversations, a quarter faster than one A100 can take
#
# Prompts of 1,155 tokens and answers of 212 on average; 48 seats. The queue grows while requests
# come, so the order of the queue is all that matters.

# %%
azure = {policy: simulate("azure", policy) for policy in POLICIES}
table(azure)

# %% [markdown]
# First come, first served lets both wait for 53 s. With `priority`, `fair` or `wfq` `client-0` waits
# for less than half a second, and `client-1`, which sends four times as much, a quarter longer. The
# tokens per second stay what they were: somebody else goes first, nothing more.
#
# `preemptive` does not wait for a seat but takes one. `client-0` gains a tenth of a second;
# `client-1` waits twice as long as with `priority`, because what was displaced is computed again.
# Eight percent of the output tokens per second are lost to that.

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
for client, panel in zip(("client-0", "client-1"), panels, strict=True):
    for policy, result in azure.items():
        rows = result.requests
        waits = np.sort(rows["ttft"][rows["client"] == client])
        panel.plot(waits, np.arange(1, len(waits) + 1) / len(waits), label=policy)
    panel.set(xscale="log", xlabel="TTFT (s)", title=client)
panels[0].set_ylabel("share of requests")
legend = panels[1].legend(frameon=False)
# %% [markdown]
# ## Mooncake's conversations: long prompts in bursts
#
# Prompts of 12,000 tokens on average, ten at a time; an H100 holds 0.3 of the trace's rate. Here
# the wait is for the prompts before one's own, and seldom for a seat.

# %%
mooncake = {policy: simulate("mooncake", policy) for policy in POLICIES}
table(mooncake)

# %% [markdown]
# `priority` does much for `client-0`, since it does not ask what anybody has received. `preemptive` is
# hardly better: seats are free, and nobody is displaced for the tokens of a step. `wfq` counts a
# client's next prompt before it is served, `fair` only once it has been; with prompts that differ a
# hundredfold that is worth 0.6 s of the mean, and seven seconds of the P99.
#
# ## The real traces
#
# What `REAL = True` says, as mean TTFT in s of `client-0` / `client-1`:
#
# | | fcfs | priority | preemptive | fair | wfq |
# |---|---|---|---|---|---|
# | Azure | 51.8 / 51.9 | 0.3 / 64.7 | 0.2 / 124.1 | 0.4 / 64.7 | 0.4 / 64.6 |
# | Mooncake | 3.8 / 3.7 | 1.2 / 4.3 | 1.2 / 4.3 | 2.3 / 4.0 | 1.7 / 3.8 |
#
# The verdicts are the same, but for the P99 of `client-0` on Mooncake, where `wfq` (12.5 s) is little
# better than `fair` (13.1 s): who goes first is cheap to decide, who is thrown out is not.
