# %% [markdown]
# # Memory and preemption
#
# How many requests run at once is decided by the memory that is left for keys and values. What if it
# runs out in the middle of an answer? vLLM takes the request that was admitted last out of the batch
# and later computes its tokens again (*recomputation*); it can also copy its blocks to the host
# (*swap*). When is which better, and what does it cost?

# %%
# %matplotlib inline
import pandas as pd

from simulator import load_scenario, run
from simulator.figures import Run, draw_kv

SETTINGS = ["workload.num_prompts=600", "engine.max_num_batched_tokens=2048"]


def simulate(label, *settings):
    return Run.of(label, run(load_scenario("../scenarios/demo.yaml", [*SETTINGS, *settings])))


# %% [markdown]
# ## Pages against one piece
#
# Before PagedAttention (SOSP 2023) a request reserved room for the longest answer on admission:
# `allocation: contiguous`. Both engines have the same memory.

# %%
BLOCKS = "engine.num_gpu_blocks_override=4096"
layouts = [simulate(name, BLOCKS, f"engine.allocation={name}") for name in ("contiguous", "paged")]
draw_kv(layouts)

# %%
KEYS = ["output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms"]


def table(runs):
    columns = {}
    for each in runs:
        own = {key: each.summary[key] for key in KEYS}
        for key in ("memory_efficiency", "max_running", "preemptions", "swap_time"):
            own[key] = each.summary["headway"][key]
        columns[each.label] = own
    return pd.DataFrame(columns).astype(float).round(2)


table(layouts)

# %% [markdown]
# ## Less and less memory
#
# Now paged, with fewer and fewer blocks of 16 tokens. The server is the same; only its cache shrinks.

# %%
sizes = [
    simulate(f"{blocks:,} blocks", f"engine.num_gpu_blocks_override={blocks}")
    for blocks in (6000, 3000, 1500)
]
draw_kv(sizes)

# %%
table(sizes)

# %% [markdown]
# Crosses are preemptions. A cache that is nearly full is fine: 3,000 blocks serve almost as much as
# 6,000. With 1,500 too few requests fit at once, and a queue grows.
#
# ## Recompute or swap?

# %%
TIGHT = "engine.num_gpu_blocks_override=1500"
modes = [simulate(mode, TIGHT, f"engine.preemption_mode={mode}") for mode in ("recompute", "swap")]
table(modes)

# %% [markdown]
# Where the time of a preempted request goes, in seconds (the parts add up to its E2EL):

# %%
PARTS = [
    "queue_time",
    "prefill_time",
    "decode_alone_time",
    "decode_slowed_time",
    "preempted_time",
    "recompute_time",
    "swap_time",
]
pd.DataFrame(
    {each.label: each.requests[each.requests.preemptions > 0][PARTS].mean() for each in modes}
).round(3)

# %% [markdown]
# A preempted request loses some tenths of a second here; nearly all of its time is the queue before
# it. Swapping saves the recomputation, and is better by some percent; it would lose where the link to
# the host is slow (`swap_bandwidth`) or prompts are short.
#
# ## Keep some room instead
#
# Preemptions can be avoided by admitting less: `watermark` keeps a share of the blocks free,
# `reserve_output_tokens: max_tokens` admits only whose whole answer is sure to fit.

# %%
rules = {
    "as vLLM": (),
    "watermark 10 %": ("engine.watermark=0.1",),
    "reserve": ("engine.reserve_output_tokens=max_tokens",),
}
table([simulate(name, TIGHT, *settings) for name, settings in rules.items()])

# %% [markdown]
# No preemption any more, and no more throughput either: what is kept free serves nobody. Preemptions
# are a sign that memory is short, not the disease. They hurt the user whose answer stops in the
# middle: a small `watermark` spares that (mean TPOT falls) for a little throughput and a longer queue.
