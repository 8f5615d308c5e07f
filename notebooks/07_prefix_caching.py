# %% [markdown]
# # Is prefix caching worth it?
#
# Prompts that begin alike (a system prompt, a document, the conversation so far) need not be computed
# twice: vLLM keeps the blocks of the KV cache and finds them again by a hash. How much does this save, and
# when does it stop working? It depends on three things: how much is shared, how many different
# prefixes there are, and how much memory is left to keep them.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import pandas as pd

from headway import load_scenario, run


def simulate(*settings):
    summary = run(load_scenario("prefixes", settings)).summary()
    return {
        "hit rate, %": 100 * summary["headway"]["prefix_cache_hit_rate"],
        "mean TTFT, ms": summary["mean_ttft_ms"],
        "P99 TTFT, ms": summary["p99_ttft_ms"],
        "output tokens/s": summary["output_throughput"],
    }


# %% [markdown]
# ## On and off
#
# Llama-3-8B on one A100, ten requests a second. Each has one of 50 system prompts of 1,500 tokens on
# average, some popular, and 200 tokens of its own; answers have 100 tokens.

# %%
ways = {"off": ["engine.enable_prefix_caching=false"], "on": []}
pd.DataFrame({name: simulate(*settings) for name, settings in ways.items()}).T.round(1)

# %% [markdown]
# This GPU cannot serve the load without it: TTFT is a queue that grows as long as requests
# come. Every request is served at once with it.
#
# ## How many prefixes, and how much memory
#
# The same traffic with more and more different prefixes, on three sizes of the KV cache.

# %%
PREFIXES, BLOCKS = (5, 20, 50, 100, 200, 400), (6000, 12000, 24000)
rows = {
    (blocks, count): simulate(
        f"engine.num_gpu_blocks_override={blocks}",
        f"workload.prefix_groups.num_prefixes={count}",
    )
    for blocks in BLOCKS
    for count in PREFIXES
}
table = pd.DataFrame(rows).T.rename_axis(["blocks", "prefixes"])
table["mean TTFT, ms"].unstack("blocks").round(0)

# %%
figure, panels = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for panel, name in zip(panels, ("hit rate, %", "mean TTFT, ms"), strict=True):
    for blocks in BLOCKS:
        part = table.loc[blocks]
        panel.plot(part.index, part[name], marker="o", label=f"{blocks:,} blocks")
    panel.set(title=name, xlabel="different prefixes", xscale="log")
panels[1].set_yscale("log")
legend = panels[0].legend(frameon=False)

# %% [markdown]
# ## And when nothing is shared
#
# The same lengths without a common beginning, at four requests a second, as this GPU cannot
# serve ten a second with or without a cache. The cache finds nothing, and costs nothing.

# %%
ALONE = "workload.prefix_groups={num_prefixes: 2000, prefix_len: 1500, zipf: 0}"
slow = "workload.request_rate=4"
pd.DataFrame({name: simulate(ALONE, slow, *more) for name, more in ways.items()}).T.round(1)

# %% [markdown]
# ## What to do
#
# 1. Leave it on, as vLLM does: where nothing is shared it costs nothing, and where prompts share most of
#    their tokens it decides whether the GPU serves the load.
# 2. Look at the hit rate. It is 76 % with 50 prefixes, which fit into 6,000 blocks (96,000 tokens). Four
#    times as many make the mean TTFT 26 times as long; eight times as many bring the queue back.
# 3. When it falls, buy memory for the cache before compute: twice the blocks keep twice the prefixes.
#    `kv_cache_dtype: fp8` doubles them, host memory (`kv_offloading_size`) adds to them, and
#    over several replicas the router `prefix_aware` keeps each prefix in one place.
#
# Your own share is in `headway trace describe LOG` ("prefix sharing"), if the log has hashes or texts.
