# %% [markdown]
# # Which GPU?
#
# A GPU that costs twice as much need not be worth twice as much, and the cheapest may not keep your
# promise at all. So the question is two: which GPU gives most for a dollar under *your* service
# levels, and what does the fleet cost that serves *your* load? The example has Llama-3-8B, the lengths of
# Azure's conversations of 2023, a P99 TTFT of one second and a P99 TPOT of 60 ms.

# %%
# %matplotlib inline
import tempfile

from headway import plan, sweep
from headway.figures import draw_latency

SLO = ["p99_ttft_ms<=1000", "p99_tpot_ms<=60"]
GPUS = {"gpu.name": ["L4", "L40S", "A100-80GB", "H100-80GB"]}
# Short runs, for a notebook; `cost: null` is the shipped profile of each model and GPU.
SHORT = ["plan.min_duration=120", "plan.max_duration=240", "plan.most_replications=4", "cost=null"]

# %% [markdown]
# ## Load and latency
#
# First the curve: with more requests a second all wait longer, first a little, then without end.

# %%
AXES = {
    "cost": [None],
    "gpu.name": ["L40S", "A100-80GB", "H100-80GB"],
    "workload.num_prompts": [400],
    "workload.request_rate": [1, 2, 4, 6, 8],
}
draw_latency(sweep("demo", AXES, out=tempfile.mkdtemp(), jobs=2))

# %% [markdown]
# ## What one GPU serves
#
# `plan` searches for the largest rate that keeps the bounds, with several seeds where chance could
# decide. `at` is requests a second.

# %%
alone = plan("demo", SLO, GPUS, overrides=SHORT, jobs=2)
COLUMNS = ["gpu.name", "at", "p99_ttft_ms", "p99_tpot_ms", "dollars_per_hour"]
alone[[*COLUMNS, "dollars_per_million_output_tokens"]].round(2)

# %% [markdown]
# An L4 keeps the bounds at no rate: the longest prompts alone take it more than a second. The
# dearest of the others is the cheapest by the token: an H100 costs twice an A100 and serves three times the
# load.
#
# ## What the fleet for our load costs
#
# Tokens are cheap where GPUs are full. Our load is 20 requests a second, and GPUs come whole: how
# few of each serve it?

# %%
load = [*SHORT, "workload.request_rate=20"]
some = {"gpu.name": ["L40S", "A100-80GB", "H100-80GB"]}
fleet = plan("demo", SLO, some, fewest="cluster.replicas=1..8", overrides=load, jobs=2)
fleet[["gpu.name", "at", "p99_ttft_ms", "p99_tpot_ms", "dollars_per_hour"]].round(2)

# %% [markdown]
# `at` is the number of GPUs. Six L40S are the cheapest here, though a token on a full H100 costs a
# quarter less: two H100s serve 27 requests a second, and the load is 20. The plan makes four runs at most
# here, so it does not trust a close number (four A100s); a longer plan decides it.
#
# ## What to do
#
# 1. Ask for a fleet for your load, not for a GPU: prices by the token are true where GPUs are full.
# 2. Write the service levels down first. They, not the price, take the L4 out.
# 3. Small load: the cheapest GPU that keeps the bounds. Large load: the one with the cheapest token, here
#    H100s. Plan twice your load, too: the choice may change there.
# 4. `headway plan my.yaml --buy` asks all of this at once, of every GPU with a price and measured kernels, with precisions and
#    tensor parallelism, and says what would change the answer (`docs/planning.md`).
