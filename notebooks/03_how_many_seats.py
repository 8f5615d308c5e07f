# %% [markdown]
# # How many seats?
#
# `max_num_seqs` is how many requests may be in the batch at once: the knob of vLLM that people turn
# first. Too few, and a queue grows beside an idle GPU. Too many, and each token comes later, or the
# memory for keys and values runs out in the middle of answers. How many are right, and when does it
# not matter?

# %%
# %matplotlib inline
import tempfile

import matplotlib.pyplot as plt
import pandas as pd

from headway import load_scenario, run, sweep
from headway.figures import Run, draw_kv

SEATS = [16, 24, 32, 64, 128, 256]
LOAD = {"workload.num_prompts": [1500], "workload.request_rate": [5]}


def seats(**more):
    keys = {f"engine.{name}": [value] for name, value in more.items()}
    axes = {**LOAD, **keys, "engine.max_num_seqs": SEATS}
    rows = sweep("demo", axes, out=tempfile.mkdtemp(), jobs=2)
    return rows.set_index("engine.max_num_seqs")


# %% [markdown]
# ## One GPU, five requests a second
#
# Requests have the lengths of Azure's conversations of 2023; Llama-3-8B runs on one A100. `max_running` is the
# largest number of requests in a batch.

# %%
SHOWN = ["output_throughput", "p99_ttft_ms", "p99_tpot_ms", "max_running", "preemptions"]
plenty = seats()
plenty[SHOWN].round(1)

# %%
figure, panels = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")
for panel, name in zip(panels, SHOWN, strict=False):
    panel.plot(plenty.index, plenty[name], marker="o")
    panel.set(title=name, xlabel="max_num_seqs", xscale="log", xticks=SEATS, xticklabels=SEATS)
panels[1].set_yscale("log")

# %% [markdown]
# Sixteen and 24 seats are too few: the queue grows as long as requests come. 32 seats serve
# everybody, and some wait for seconds; from 64 on nothing changes, since never more than 57 requests are
# there at once. **Seats above what the load fills cost nothing.**
#
# ## When memory is short
#
# The same with 3,000 blocks of 16 tokens for keys and values, as a larger model or a smaller GPU
# leaves. Now requests are preempted: vLLM takes the one that was admitted last out of the batch, and
# computes it again later.

# %%
short = seats(num_gpu_blocks_override=3000)
short[[*SHOWN, "kv_cache_usage_mean"]].round(2)

# %% [markdown]
# Never more than 49 requests fit, however many seats there are. Some are preempted, and throughput
# stays: a sign that memory is the limit, not the seats. Fewer seats end the preemptions, and the queue
# is longer for it.
#
# ## What a preemption costs
#
# The runs have half of that memory again. A preempted request can be computed anew, or its blocks are copied
# to the host and back (`preemption_mode: swap`), or fewer are admitted (`watermark` keeps a share of
# the blocks free).

# %%
TIGHT = ["engine.num_gpu_blocks_override=1500", "workload.num_prompts=600"]
WAYS = {
    "recompute": (),
    "swap": ("engine.preemption_mode=swap",),
    "watermark 10 %": ("engine.watermark=0.1",),
}
runs = [Run.of(name, run(load_scenario("demo", [*TIGHT, *more]))) for name, more in WAYS.items()]
KEYS = ["output_throughput", "mean_ttft_ms", "mean_tpot_ms", "p99_itl_ms"]
table = pd.DataFrame({each.label: pd.Series(each.summary)[KEYS] for each in runs}).T
table["preemptions"] = [each.summary["headway"]["preemptions"] for each in runs]
table.astype(float).round(1)

# %%
draw_kv(runs)

# %% [markdown]
# Copying gains some percent where the link to the host is fast. Room that is kept free ends the
# preemptions: tokens come more evenly, for a little throughput and a longer queue.
#
# ## What to do
#
# 1. Start with vLLM's default (256 or more), and look at `max_running` and at preemptions.
# 2. If `max_running` is below the seats, leave them: more change nothing.
# 3. If all seats are full and a queue grows, double them, until TPOT breaks its bound or the KV
#    cache is full.
# 4. If the cache is full and requests are preempted, buy memory before you take seats away: a GPU with
#    more of it, `kv_cache_dtype: fp8`, or another replica. A small `watermark` spares users the pause.
#
# `headway plan my.yaml --vary engine.max_num_seqs=32,64,128,256` finds the best under your service
# levels, and says where fewer seats do as well.
