"""The formats that are tables in CSV: Azure's of 2023 and 2024, BurstGPT's, and plain lengths."""

from simulator.workload.traces.csv_columns import csv_format, seconds, timestamps, tokens
from simulator.workload.traces.format import Published

SOURCE = (
    "the Azure LLM inference trace {} of the Microsoft Azure Public Dataset ({}), licence "
    "CC-BY-4.0: get {} from the repository Azure/AzurePublicDataset on GitHub"
)
SPLITWISE = "Patel et al., Splitwise, ISCA'24"
DYNAMO_LLM = "Stojkovic et al., DynamoLLM, HPCA'25"

AZURE = csv_format(
    "azure",
    "CSV: TIMESTAMP,ContextTokens,GeneratedTokens",
    (timestamps("TIMESTAMP"), tokens("ContextTokens"), tokens("GeneratedTokens")),
    published=(
        Published(
            ("_1week", "azure_llm_2024"),
            SOURCE.format("2024", DYNAMO_LLM, "the link in AzureLLMInferenceDataset2024.md"),
        ),
        Published(
            ("azurellminferencetrace_code", "azure_llm_2023_code"),
            SOURCE.format("2023 (code)", SPLITWISE, "data/AzureLLMInferenceTrace_code.csv"),
        ),
        Published(
            ("azurellminferencetrace_", "azure_llm_2023"),
            SOURCE.format("2023 (conversation)", SPLITWISE, "data/AzureLLMInferenceTrace_conv.csv"),
        ),
    ),
)
"""The Azure LLM inference traces of 2023 and 2024."""

BURSTGPT = csv_format(
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
    idle=("Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"),
)
"""Requests to ChatGPT and GPT-4 at a university; the lines of failed ones are kept."""

LENGTHS = csv_format(
    "lengths",
    "CSV: [arrived_at,]num_prefill_tokens,num_decode_tokens",
    (
        seconds("arrived_at", optional=True),
        tokens("num_prefill_tokens"),
        tokens("num_decode_tokens"),
    ),
    idle=("num_total_tokens", "pd_ratio"),
)
"""Plain lengths, with arrivals (Splitwise) or without (Vidur, Sarathi-Serve)."""
