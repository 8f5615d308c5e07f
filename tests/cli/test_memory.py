"""`headway memory`: what fits on a GPU."""

import re

from simulator.cli.main import main


def test_memory_prints_the_budget(capsys):
    """With the options of the engine that it depends on."""
    model = ["--model", "llama-3-8b", "--gpu", "A100-80GB"]
    assert main(["memory", *model, "--quantization", "fp8", "--kv-cache-dtype", "fp8"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"KV per token \(fp8\) +64.0 KiB", told)
    assert main(["memory", *model, "--max-model-len", "1000"]) == 0
    assert "max_model_len = 1,000" in capsys.readouterr().out
