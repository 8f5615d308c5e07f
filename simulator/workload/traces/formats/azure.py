"""The Azure LLM inference traces of 2023 and 2024."""

from simulator.workload.traces.csv_columns import csv_format, timestamps, tokens
from simulator.workload.traces.format import Published

SOURCE = (
    "the Azure LLM inference trace {} of the Microsoft Azure Public Dataset ({}), licence "
    "CC-BY-4.0: get {} from the repository Azure/AzurePublicDataset on GitHub"
)
SPLITWISE = "Patel et al., Splitwise, ISCA'24"
DYNAMO_LLM = "Stojkovic et al., DynamoLLM, HPCA'25"

FORMAT = csv_format(
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
