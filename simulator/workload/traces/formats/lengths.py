"""Plain lengths, with arrivals (Splitwise) or without (Vidur, Sarathi-Serve)."""

from simulator.workload.traces.csv_columns import csv_format, seconds, tokens

FORMAT = csv_format(
    "lengths",
    "CSV: [arrived_at,]num_prefill_tokens,num_decode_tokens",
    (
        seconds("arrived_at", optional=True),
        tokens("num_prefill_tokens"),
        tokens("num_decode_tokens"),
    ),
)
