"""BurstGPT: requests to ChatGPT and GPT-4 at a university; the lines of failed ones are kept."""

from simulator.workload.traces.csv_columns import csv_format, seconds, tokens
from simulator.workload.traces.format import Published

FORMAT = csv_format(
    "burstgpt",
    "CSV: Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    (
        seconds("Timestamp"),
        tokens("Request tokens"),
        tokens("Response tokens", least=0),  # 0: the request failed
    ),
    published=(
        Published(
            ("burstgpt",),
            "BurstGPT (Wang et al., KDD'25), licence CC-BY-4.0: get it from the releases of the "
            "repository HPMLL/BurstGPT on GitHub",
        ),
    ),
)
