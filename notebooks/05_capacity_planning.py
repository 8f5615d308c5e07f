# %% [markdown]
# # Capacity planning
#
# A product manager promises a P99 TTFT of two seconds and a P90 TPOT of 50 ms. How many requests per
# second does one GPU hold? Which knob helps? What does a million tokens cost?

# %%
# %matplotlib inline
import tempfile

import yaml

from simulator import plan, sweep
from simulator.figures import draw_chunk, draw_latency, draw_pareto

SCENARIO = "../scenarios/demo.yaml"
folder = tempfile.mkdtemp()

# %% [markdown]
# ## Load and latency
#
# First a look at the whole curve: `sweep` runs the scenario at every combination of values, on all
# cores. All points share their random numbers, so the same requests come everywhere, only faster.

# %%
rows = sweep(
    SCENARIO,
    {
        "workload.num_prompts": [400],
        "workload.request_rate": [2, 3, 4, 5, 6, 7],
        "engine.max_num_batched_tokens": [256, 512, 2048],
    },
    out=f"{folder}/load",
    jobs=2,
)
draw_latency(rows)

# %% [markdown]
# A larger budget of tokens per step lets prompts through faster (TTFT), but makes the steps longer that
# decoding requests share with them (TPOT, ITL). At 5 requests per second:

# %%
draw_chunk(rows[rows["workload.request_rate"] == 5])

# %%
draw_pareto(rows)

# %% [markdown]
# ## The largest rate under the promise
#
# `plan` searches for it, with several seeds at each place, as long as chance could decide.

# %%
SLO = ["p99_ttft_ms<=2000", "p90_tpot_ms<=50"]
scenario = yaml.safe_load(open(SCENARIO))
scenario["workload"]["num_prompts"] = 400
scenario["plan"] = {"tolerance": 0.05, "most_replications": 4}
path = f"{folder}/plan.yaml"
yaml.safe_dump(scenario, open(path, "w"))

answer = plan(path, SLO, {"engine.max_num_batched_tokens": [512, 2048]}, jobs=2)
COLUMNS = [
    "engine.max_num_batched_tokens",
    "at",
    "p99_ttft_ms",
    "p90_tpot_ms",
    "tokens_per_s_per_gpu",
    "dollars_per_million_output_tokens",
]
answer[COLUMNS].round(2)

# %% [markdown]
# `at` is requests per second. 400 requests are about a minute and a half of traffic, which is short: near its
# limit a server needs long to fill its queue, so plan with more (`num_prompts`) before you buy.
#
# ## The cheapest for the load we have

# %%
scenario["workload"]["request_rate"] = 3
del scenario["cost"]  # the shipped profile of model and GPU
yaml.safe_dump(scenario, open(path, "w"))
fleet = plan(path, SLO, {"gpu.name": ["A100-80GB", "H100-80GB"]}, cheapest=True, jobs=2)
fleet[["gpu.name", "holds", "p99_ttft_ms", "p90_tpot_ms", "dollars_per_hour"]].round(2)
