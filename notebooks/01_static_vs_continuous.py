# %% [markdown]
# # Static against continuous batching
#
# A GPU decodes one token for a whole batch in hardly more time than for one request. So everybody
# batches; the question is when a request may join. *Static* batching takes a batch, pads it to its
# longest prompt and lets nobody on until the last answer is complete. *Continuous* batching
# (iteration-level scheduling, Orca, OSDI 2022; the default of vLLM) decides anew at every step.
#
# How much is gained? The runs below have 600 requests with the lengths of Azure's conversation trace, on Llama-3-8B
# and one A100, with 24 seats.

# %%
# %matplotlib inline
import pandas as pd

from headway import load_scenario, run
from headway.figures import Run, draw_kv, draw_occupancy, draw_throughput

SETTINGS = ["engine.max_num_seqs=24", "workload.num_prompts=600"]


def simulate(policy, *more):
    settings = [*SETTINGS, f"engine.scheduling_policy={policy}", *more]
    return run(load_scenario("../scenarios/demo.yaml", settings))


results = {policy: simulate(policy) for policy in ("static", "fcfs")}
runs = [Run.of(policy, result) for policy, result in results.items()]

# %% [markdown]
# ## Which request has which seat
#
# Each row is a seat in the batch, each coloured bar a request, for one minute. Grey is a seat whose
# request is done and which nobody may take.

# %%
draw_occupancy(runs, seconds=60)

# %% [markdown]
# ## What it costs

# %%
KEYS = ["output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"]
table = pd.DataFrame({run.label: pd.Series(run.summary)[KEYS] for run in runs})
for key in ("wasted_share", "decode_seat_utilization", "memory_efficiency"):
    table.loc[key] = [run.summary["headway"][key] for run in runs]
table["ratio"] = table["fcfs"] / table["static"]
table.astype(float).round(3)

# %%
draw_throughput(runs)

# %% [markdown]
# The queue of static batching grows for as long as requests come: TTFT there says how long the run
# was, not how fast the server is. And it does not even use the memory that it takes: padding and
# finished requests keep KV blocks.

# %%
draw_kv(runs)

# %% [markdown]
# ## When is the difference small?
#
# Static batching wastes what separates the longest answer of a batch from the others. Answers of one
# length waste nothing at the end: the rest of the gap is padding of prompts, and prompts that wait
# for a batch to end.

# %%
rows = []
for spread, lengths in {"all alike": "212", "as in the trace": None}.items():
    more = [f"workload.output_len={lengths}"] if lengths else []
    speeds = [simulate(p, *more).summary()["output_throughput"] for p in ("static", "fcfs")]
    rows.append((spread, *speeds, speeds[1] / speeds[0]))
pd.DataFrame(rows, columns=["output lengths", "static", "fcfs", "ratio"]).round(2)

# %% [markdown]
# So the figure that you read in a paper ("continuous batching is N times faster") belongs to its
# distribution of lengths.
#
# ## At which load?
#
# The request rate grows until both ways are overloaded. The table has what each serves, how many of its seats
# it uses, and what a token costs in energy.

# %%
rows = {}
for rate in (0.5, 1, 2, 4, 6):
    for policy in ("static", "fcfs"):
        summary = simulate(policy, f"workload.request_rate={rate}").summary()
        own = summary["headway"]
        rows[rate, policy] = {
            "served/s": summary["request_throughput"],
            "mean TTFT, s": summary["mean_ttft_ms"] / 1000,
            "GPU busy, %": 100 * own["gpu_busy_fraction"],
            "decode seats used, %": 100 * own["decode_seat_utilization"],
            "J per output token": own["joules_per_output_token"],
        }
pd.DataFrame(rows).T.rename_axis(["requests/s", "policy"]).round(2)

# %% [markdown]
# **Busy says least.** Static batching keeps the GPU busy from one request a second on, and serves
# hardly more than that however many come: most of its seats belong to answers that are done.
#
# ## What to do
#
# 1. Serve with continuous batching. It is the default of vLLM, SGLang and TensorRT-LLM: what remains to
#    do is to leave a server that batches in its own code (a loop around `generate`).
# 2. Static batches are good enough for jobs offline whose answers have one length: embeddings,
#    classification, answers cut at `max_tokens`.
# 3. Do not size by GPU busy. Look at seats used, and at the queue.
# 4. Measure your own gain: `headway compare demo --vary engine.scheduling_policy=static,fcfs --set
#    'workload={trace: {path: LOG}}'`.
