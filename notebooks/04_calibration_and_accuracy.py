# %% [markdown]
# # Calibration and accuracy
#
# A simulation is as good as its clock. Where do the seconds of a step come from, how wrong are they,
# and how wrong is what is built on them? This notebook fits a cost profile to measured steps that
# come with Headway's sources: its own torch engine ran a tiny model on one CPU core. The same
# path leads from your GPU (`headway calibrate --device cuda`) to a profile.

# %%
# %matplotlib inline
import warnings
from pathlib import Path

import pandas as pd

from calibration.engine_steps.fit import fit_rows, judge
from calibration.engine_steps.steps_file import read_rows
from calibration.engine_steps.validate import table, validate
from headway import load_scenario, run
from headway.figures import draw_steps

MEASURED = Path("../calibration/measurements/cpu/tiny-test")
rows = read_rows(MEASURED / "steps.csv.gz")
frame = pd.DataFrame(
    {"kind": row.kind, "tokens": row.tokens, "ms": 1e3 * row.device_s} for row in rows
)
frame.groupby("kind").agg(
    steps=("ms", "size"), tokens=("tokens", "max"), median_ms=("ms", "median")
)

# %% [markdown]
# `decode`, `prefill` and `mixed` are a grid of made-up steps that covers the range; `onpolicy` are steps
# of real schedules; `swap_*` copy KV blocks to the host and back; `probe` is always the same step, to
# see the machine drift.
#
# ## The fit
#
# Non-negative least squares on a form with meaning: a constant, a curve over the tokens (matrix products),
# slopes per sequence, per cached token, per (query, key) pair (attention). Errors are of steps that the
# fit had not seen.

# %%
fit = fit_rows(rows)
pd.DataFrame(
    {
        kind: {
            "steps": e.points,
            "median %": 100 * e.median,
            "P95 %": 100 * e.p95,
            "bias %": 100 * e.bias,
        }
        for kind, e in fit.held_out.items()
    }
).T.round(1)

# %%
unseen = [sample for sample in fit.samples if sample.held_out]
draw_steps(
    pd.DataFrame(
        {
            "seconds": [sample.seconds for sample in unseen],
            "predicted_s": [fit.cost.execute(sample.row.step).seconds for sample in unseen],
            "chunks": [sample.row.chunks or None for sample in unseen],
        }
    )
)

# %% [markdown]
# (The picture shows the profile as it is shipped, which is fitted to all; the table above is held out.)
#
# ## How much must one measure?
#
# The same fit to every n-th step only, judged on all steps:

# %%
found = []
for every in (1, 4, 16, 64):
    part = fit_rows(rows[::every])
    error = judge(part.cost, fit.samples)
    found.append((len(rows[::every]), 100 * error.median, 100 * error.p95))
pd.DataFrame(found, columns=["steps measured", "median error %", "P95 %"]).round(1)

# %% [markdown]
# ## From steps to what users feel
#
# Errors of steps partly cancel over a request. Headway ran a scenario live on this engine, and
# `headway validate` compares that run with its simulation: every step from what it computed
# (teacher-forced), and the whole run by itself (free-running), beside the distance of three live
# runs from each other.

# %%
print(table(validate(MEASURED / "live", out=Path("../out/notebook-04"))))

# %% [markdown]
# ## Beyond what was measured
#
# A profile knows its range. A run that leaves it says so; the figures are then an extrapolation.

# %%
settings = [
    "workload.num_prompts=20",
    "engine.max_num_seqs=128",
    "engine.max_num_batched_tokens=2048",
]
settings += ["workload.request_rate=inf", "workload.input_len=600"]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    run(load_scenario("../scenarios/live-tiny-cpu.yaml", settings))
print(*(warning.message for warning in caught), sep="\n")

# %% [markdown]
# ## And real servers?
#
# That was our own engine, with a tiny model. Profiles for real models and GPUs are composed of
# published kernel measurements, and compared with published runs of vLLM servers: mean TPOT within
# 5 % in the six that have a row per request, the P99 of TTFT up to 72 % off where the server's memory or
# common prefixes were not recorded.
# [docs/accuracy.md](../docs/accuracy.md) has every figure, what was tuned on what, and what is missed.
