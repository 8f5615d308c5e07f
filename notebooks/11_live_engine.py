# %% [markdown]
# # A real vLLM, predicted
#
# `headway calibrate --server` drove a vLLM 0.32 that computes on one CPU core: a Llama of 6 layers with
# random weights, its real engine core, asynchronous scheduler and OpenAI server. A closed loop of 1, 2,
# 4 ... clients went up to the knee, then open loops came, every second one held out. This notebook reads
# what was measured, fits the cost of a step from the requests alone, and predicts the loads that the fit
# has not seen, request by request.
#
# The last cell runs a scenario on vLLM, live, if this Python has it.

# %%
# %matplotlib inline
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from calibration.running_server.judge import compare
from calibration.server_logs.from_loads import Load, fit_loads
from headway import load_scenario
from simulator.workload.workload import Workload

folder = Path("../calibration/measurements/cpu/vllm-0.32-tiny-llama")
server = load_scenario(folder / "scenario.yaml")
rows = pd.read_csv(folder / "requests.csv.gz")
rows.groupby("load", sort=False).agg(
    requests=("ttft_s", "size"),
    clients=("clients", "first"),
    prompt=("prompt_tokens", "mean"),
    ttft_ms=("ttft_s", lambda s: 1e3 * s.mean()),
    e2el_ms=("e2e_s", lambda s: 1e3 * s.mean()),
).round(1)

# %% [markdown]
# ## The fit
#
# A latency is a sum of steps, a step's time a sum of terms. Which steps a request sat through, a
# simulation tells, under the cost found before; simulation and least squares take turns. No step was
# logged.


# %%
def load_of(name, some):
    """Return a load as it was sent: a closed loop by its clients, an open one by its times."""
    clients = int(some.clients.iloc[0])
    arrival = np.zeros(len(some)) if clients else some.arrival_s.to_numpy()
    sent = Workload(
        arrival,
        some.prompt_tokens.to_numpy(),
        some.output_tokens.to_numpy(),
        max_concurrency=clients or None,
    )
    held_out = bool(some.held_out.iloc[0])
    return Load(name, sent, some.ttft_s.to_numpy(), some.e2e_s.to_numpy(), held_out)


loads = [load_of(name, some) for name, some in rows.groupby("load", sort=False)]
fit = fit_loads(server, [load for load in loads if not load.held_out])
print(f"{1e3 * fit.latency:.1f} ms between the client and the scheduler")
for tokens, seconds in fit.cost.dense:
    print(f"{tokens:4} tokens in a step: {1e3 * seconds:6.2f} ms")

# %% [markdown]
# ## Loads that the fit has not seen

# %%
judged = [one for one in compare(server, fit, loads) if one.load.held_out]
errors = {
    one.load.name: {f"{name.upper()}, %": 100 * one.error(name) for name in one.values}
    for one in judged
}
pd.DataFrame(errors).T.round(1)

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
for axis, name in zip(axes, ("ttft", "tpot", "e2el"), strict=True):
    for one in judged:
        predicted, measured = (1e3 * side for side in one.values[name])
        axis.loglog(measured, predicted, ".", ms=4, alpha=0.6, label=one.load.name)
    ends = axis.get_xlim()
    axis.plot(ends, ends, color="black", lw=1)
    axis.xaxis.set_minor_formatter(plt.NullFormatter())
    axis.yaxis.set_minor_formatter(plt.NullFormatter())
    axis.set(title=name.upper(), xlabel="measured (ms)", ylabel="predicted (ms)")
axes[0].legend(fontsize=7)
figure.suptitle("Requests of the loads held out; line: as measured")
plt.show()

# %% [markdown]
# ## Live
#
# The same scenario on the vLLM of this Python, if there is one: its engine decides and computes, in this
# process. `headway live scenario.yaml --engine vllm` does that from the command line.

# %%
if find_spec("vllm") is None:
    print("vLLM is not installed in this Python: the rows above are what was measured with it")
else:
    from gpu_backend.vllm_engine import run_vllm
    from headway import run

    short = load_scenario(folder / "scenario.yaml", ["workload.num_prompts=60"])
    for word, result in (("live", run_vllm(short).result), ("simulated", run(short))):
        summary = result.summary()
        print(word, {key: round(summary[f"mean_{key}_ms"], 1) for key in ("ttft", "tpot", "e2el")})
