# %% [markdown]
# # A policy of your own
#
# An engine that serves chats and batch jobs together: chats are short and somebody waits for them,
# batch jobs are long and nobody does. You would like chats to go first, but no batch job to wait for
# ever. How much does that buy, and how long may "for ever" be? That is a class with one method.

# %%
# %matplotlib inline
import numpy as np
import pandas as pd

from headway import load_scenario, run
from headway.figures import Run, draw_policies
from headway.testing import check_policy
from simulator.workload import Workload


class ChatsFirst:
    """Serve chats first, as if batch jobs had come `patience` seconds later."""

    def __init__(self, patience: float = 60.0) -> None:
        self.patience = patience

    def key(self, request):
        late = self.patience if request.client == "batch" else 0.0
        return request.arrival + late

    def victim(self, running):
        """Preempt the last admitted batch job, if there is one."""
        batch = [request for request in running if request.client == "batch"]
        return batch[-1] if batch else list(running)[-1]


# %% [markdown]
# `key` ranks the waiting requests, smallest first. Everything else (chunked prefill, paging,
# preemption) is vLLM's scheduler. Before we believe any figure, Headway tries the class on a hundred
# small engines: it must end every request, leak no block, keep to the limits, and not know how long
# an answer will be.

# %%
check_policy(ChatsFirst, patience=2.0)

# %% [markdown]
# ## What a mistake looks like
#
# Ranking by `output_tokens` is tempting and impossible: no engine knows the length of an answer
# before it has been written.


# %%
class Oracle:
    def key(self, request):
        return request.output_tokens


try:
    check_policy(Oracle)
except AssertionError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# ## The workload
#
# Five chats and half a batch job a second for four minutes, on one A100 with 16 seats.

# %%
rng = np.random.default_rng(0)
chats, jobs = 1200, 120
arrival = np.concatenate([rng.uniform(0, 240, chats), rng.uniform(0, 240, jobs)])
order = np.argsort(arrival)
load = Workload(
    arrival=arrival[order],
    prompt_tokens=np.concatenate([rng.integers(50, 600, chats), np.full(jobs, 3000)])[order],
    output_tokens=np.concatenate([rng.integers(20, 250, chats), np.full(jobs, 600)])[order],
    client=np.array(["chat"] * chats + ["batch"] * jobs)[order].tolist(),
)


def simulate(label, policy):
    settings = ["engine.max_num_seqs=16", f"engine.scheduling_policy={policy}"]
    result = run(load_scenario("../scenarios/demo.yaml", settings), workload=load)
    return Run.of(label, result)


# %% [markdown]
# A scenario names a class as `module:Class`; that of a notebook is `__main__`. In a project, put the
# class into a module beside the scenario.

# %%
runs = [simulate("fcfs", "fcfs")]
for patience in (2, 10, 60):
    policy = f"{{policy: '__main__:ChatsFirst', patience: {patience}}}"
    runs.append(simulate(f"patience {patience} s", policy))
draw_policies(runs)

# %%
rows = {}
for each in runs:
    waits = each.requests.groupby("client", observed=True).ttft
    rows[each.label] = {
        f"{client} {word} TTFT (s)": value
        for client, times in waits
        for word, value in (("median", times.median()), ("P99", times.quantile(0.99)))
    }
pd.DataFrame(rows).T.round(2)

# %% [markdown]
# A minute of patience lets the median chat wait 0.7 s and not 5.7, and the slowest batch jobs wait
# nearly three times as long. The tokens per second hardly change: an order of the queue only decides
# which request waits.
