"""Good inputs of every kind, ways to damage them, and the command run on them in this process."""

import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.cli.main import main

SCENARIO = """name: base
model: llama-3-8b
gpu: {name: A100-80GB, count: 1}
engine:
  max_num_seqs: 8
  max_num_batched_tokens: 512
  block_size: 16
cost: {kind: linear, base: 0.01, per_token: 1.0e-5}
workload:
  num_prompts: 5
  request_rate: 10
  input_len: 32
  output_len: 4
goodput: {ttft: 1000}
seed: 1
"""
TRACES = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.0319600,396,109\n",
    "burstgpt.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n",
    "lengths.csv": "arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,5\n1.5,20,6\n",
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 600, "output_length": 5, '
    '"hash_ids": [0, 1]}\n{"timestamp": 30, "input_length": 90, "output_length": 7, '
    '"hash_ids": [0]}\n',
    "timed.jsonl": '{"timestamp": 0.5, "input_length": 20, "output_length": 5, "hash_ids": [1, 2]}'
    '\n{"timestamp": 1.5, "input_length": 9, "output_length": 7, "hash_ids": [1]}\n',
    "custom.jsonl": '{"prompt_len": 12, "output_tokens": 5}\n{"prompt_len": 7, "output_len": 3}\n',
    "serving.jsonl": '{"arrival_time_ns": 0, "input_toks": 20, "output_toks": 5}\n'
    '{"arrival_time_ns": 9000000, "input_toks": 9, "output_toks": 7}\n',
}
PROFILE = """model: llama-3-8b
hardware: {gpu: A100-80GB, tensor_parallel_size: 1, dtype: bfloat16, kv_cache_dtype: bfloat16}
cost:
  kind: piecewise
  overhead: 0.001
  decode_per_context: 8.0e-08
  dense: [[1, 0.010], [64, 0.011], [8192, 0.5]]
range: {tokens: [1, 8192], sequences: [1, 1024], context: [1, 262144], pairs: [1, 33558528]}
residuals: {decode: 0.05, prompts: 0.06}
"""
CONFIG = """{
 "num_hidden_layers": 2,
 "hidden_size": 64,
 "num_attention_heads": 4,
 "num_key_value_heads": 2,
 "intermediate_size": 128,
 "vocab_size": 1000,
 "max_position_embeddings": 4096
}
"""
GOOD = {"s.yaml": SCENARIO, "p.yaml": PROFILE, "config.json": CONFIG} | TRACES


@dataclass(frozen=True)
class Told:
    """What a command said, and what it left."""

    code: int
    out: str
    err: str
    changed: list[str]

    @property
    def lines(self) -> list[str]:
        """The lines of stderr that are no warnings."""
        return [line for line in self.err.splitlines() if not line.startswith(WARNING)]


WARNING = "headway: warning: "


def make_inputs(folder: Path) -> None:
    """Write the good inputs, and the folders that `run`, `compare` and `sweep` make of them."""
    for name, text in GOOD.items():
        (folder / name).write_text(text)
    vary = ["--vary", "engine.max_num_seqs=4,8", "--quiet"]
    assert tell(["run", "s.yaml", "--out", "run", "--quiet"]).code == 0
    clients = ["--set", "workload.clients=3"]
    assert tell(["run", "s.yaml", *clients, "--out", "shared", "--quiet"]).code == 0
    assert tell(["compare", "s.yaml", *vary, "--out", "compared"]).code == 0
    assert tell(["sweep", "s.yaml", *vary, "--out", "swept", "--jobs", "1"]).code == 0


def damage(folder: Path, edit: Sequence[Any]) -> None:
    """Do one edit, [file, what, ...]: replace, text, hex, lines, cut, remove, folder or pipe.

    In a new text `9...9` stands for a number of 5,000 digits.
    """
    name, what, *rest = edit
    rest = [one.replace("9...9", "9" * 5000) if isinstance(one, str) else one for one in rest]
    path = folder / name
    if what == "replace":
        old, new = rest
        text = path.read_text()
        assert old in text, f"{name} has no {old!r}"
        path.write_text(text.replace(old, new, 1))
    elif what == "text":
        path.write_text(rest[0] * (rest[1] if len(rest) > 1 else 1), "utf-8")
    elif what == "hex":
        path.write_bytes(bytes.fromhex(rest[0]))
    elif what == "lines":
        path.write_text("".join(path.read_text().splitlines(keepends=True)[: rest[0]]))
    elif what == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif what == "cut":
        path.write_bytes(path.read_bytes()[: rest[0]])
    else:
        path.unlink()
        if what == "folder":
            path.mkdir()


def tell(arguments: Sequence[str]) -> Told:
    """Run a command here, in the current folder."""
    before = _contents()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    after = _contents()
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    return Told(code, out.getvalue(), err.getvalue(), sorted(changed))


def _contents() -> dict[str, bytes | None]:
    here = Path()
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in here.rglob("*")
        if "__pycache__" not in path.parts
    }
