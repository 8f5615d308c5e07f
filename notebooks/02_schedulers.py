# %% [markdown]
# # Which policy?
#
# vLLM serves first come, first served. Shortest job first lowers the mean, but long requests wait
# longer, and the policy needs to know how long an answer will be. Three questions:
# what do policies give, how good must a prediction be, and which client pays?

# %%
# %matplotlib inline
import pandas as pd

from headway import load_scenario, run
from headway.figures import Run, draw_fairness, draw_policies

SETTINGS = [
    "engine.max_num_seqs=24",
    "workload.num_prompts=800",
    "workload.request_rate=5",
]


def simulate(label, *settings):
    return Run.of(label, run(load_scenario("../scenarios/demo.yaml", [*SETTINGS, *settings])))


# %% [markdown]
# ## Policies side by side
#
# The server is just full (24 seats, 5 requests/s), so the order of the queue matters. `sjf`,
# `hrrn` and `srpt` know the true length here (`predictor: oracle`): the best case.

# %%
COLUMNS = ("mean", "median", "p99")
POLICIES = {
    "fcfs": "fcfs",
    "sjf": "{policy: sjf, by: hint}",
    "hrrn": "{policy: hrrn, by: hint}",
    "srpt": "srpt",
    "mlfq": "mlfq",
}
ORACLE = "predictor.kind=oracle"
runs = [simulate(name, ORACLE, f"engine.scheduling_policy={p}") for name, p in POLICIES.items()]
draw_policies(runs)

# %% [markdown]
# The median falls under `sjf`, `hrrn` and `srpt`, and the P99 rises. `hrrn` (highest response ratio next) orders
# requests by their wait in proportion to their size. `srpt` and `mlfq` displace running requests. Their
# tokens are computed again, which costs throughput on a full machine:

# %%
pd.DataFrame(
    {
        run.label: {
            "preemptions": run.summary["headway"]["preemptions"],
            "output tokens/s": run.summary["output_throughput"],
            "median E2EL (s)": run.summary["median_e2el_ms"] / 1000,
            "P99 E2EL (s)": run.summary["p99_e2el_ms"] / 1000,
        }
        for run in runs
    }
).T.round(1)

# %% [markdown]
# ## How good must a prediction be?
#
# A real predictor errs. `noisy` multiplies the true length by exp(sigma z), z normal: with
# sigma = 1 the prediction is off by a factor of 2.7 at one standard deviation. `by: prompt`, the
# default, needs no prediction: the length of the prompt is the job.

# %%
PREDICTED = {
    f"hint, sigma {sigma}": ("hint", "predictor.kind=noisy", f"predictor.sigma={sigma}")
    for sigma in (0.0, 0.5, 1.0, 2.0)
}
rows = {("fcfs", ""): runs[0].summary}
for policy in ("sjf", "hrrn"):
    for known, (by, *settings) in (PREDICTED | {"prompt": ("prompt",)}).items():
        words = f"engine.scheduling_policy={{policy: {policy}, by: {by}}}"
        rows[policy, known] = simulate("", *settings, words).summary
pd.DataFrame(
    {
        row: {f"{name} E2EL (s)": found[f"{name}_e2el_ms"] / 1000 for name in COLUMNS}
        for row, found in rows.items()
    }
).T.rename_axis(["policy", "by"]).round(1)

# %% [markdown]
# ## Which client pays?
#
# Several clients share the server, and one sends more than the others. First come, first served gives
# most to the client that asks most. `fair` (Virtual Token Counter, OSDI 2024)
# serves the client that has received least.

# %%
CROWD = ("engine.max_num_seqs=16", "workload.request_rate=10", "workload.clients=[4, 2, 2, 2]")
shared = [simulate(n, *CROWD, f"engine.scheduling_policy={n}") for n in ("fcfs", "fair", "drr")]
draw_fairness(shared)

# %%
rows = {}
for run_ in shared:
    ttft = run_.requests.groupby("client", observed=True)["ttft"].mean()
    rows[run_.label] = {f"mean TTFT of {name}, s": value for name, value in ttft.items()}
pd.DataFrame(rows).T.sort_index(axis=1).round(1)

# %% [markdown]
# ## What to do
#
# 1. Stay with `fcfs` while the queue is short: where nobody waits, no order helps.
# 2. One queue of users, and it is long: `hrrn` by prompt, its default, which needs no prediction. The
#    median falls from 9.9 to 7.5 s here, for a P99 of 29 in place of 21 s. True lengths
#    (`by: hint`) make the median 5.9 s; a rough prediction (sigma 1) makes it 6.1 s, and the P99 45 s.
#    `sjf` gains more: its mean is 7.0 s by prompt, in place of 10.1 s. But its P99 is three to five
#    times as long as that of `fcfs`: only with `ageing`, or where nobody minds.
# 3. Take `fair` if one of several clients asks for too much. The three others wait a third less, and the
#    client that fills the queue waits half as long again.
# 4. Never `srpt` or `mlfq` on a full machine without looking at preemptions: what is displaced is computed
#    again.
#
# `headway compare my.yaml --vary engine.scheduling_policy=fcfs,fair,hrrn` asks it of your traffic, with
# `hrrn` by prompt. The policies run in the real vLLM, too (`docs/vllm-policies.md`).
