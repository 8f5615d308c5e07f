"""A real vLLM on this machine's cores: its environment, its tiny models, its server.

HEADWAY_ENGINE names the environment's folder: `make test-engine` makes it (engine_environment.py).
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from ctypes.util import find_library
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tests.support.commands import ROOT

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
SERVER_CORE, CLIENT_CORE = CORES[0], CORES[-1]
"""The engine has a core of its own where there are two: a client beside it slows it down."""
RECORDER = "headway.vllm.RecordedScheduler"
STARTUP = 600.0  # s that a server may take until it is healthy; 30 s on two idle cores
VOCABULARY = ["".join(letters) for letters in product(ascii_lowercase[:16], repeat=3)]
"""4,096 words, each a token, also to `headway serve --tokenizer`, which answers in words."""
SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
    "torch_dtype": "float32",
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "small": LLAMA
    | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    | dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    "large": LLAMA
    | {"hidden_size": 512, "intermediate_size": 1536}
    | {"num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 384,
        "sliding_window": None,
    },
}
"""What a config.json has beside SHAPE. Weights are drawn at random: `--load-format dummy`. Those of
the large Llama, 60 MB, exceed most CPUs' caches, as those of real models exceed all GPUs'."""
FLAGS = {
    "--max-num-seqs": "32",
    "--max-num-batched-tokens": "512",
    "--max-model-len": "2048",
    "--dtype": "float32",  # in bfloat16 a step takes five times as long where AVX-512 is missing
    "--block-size": "32",  # CPU attention takes multiples of 32
}
"""Of the server, where nothing else is asked for."""


def engine_folder() -> Path | None:
    """Return the environment that HEADWAY_ENGINE names; None: it is not set."""
    folder = os.environ.get("HEADWAY_ENGINE")
    return Path(folder).resolve() if folder else None


def write_model(folder: Path, kind: str = "llama") -> Path:
    """Write a tiny model without weights (config.json, a tokenizer); kinds are those of MODELS."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": VOCABULARY[number], "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for number in (0, 1)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": VOCABULARY[0]},
        "truncation": None,
        "padding": None,
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": VOCABULARY[0],
        "eos_token": VOCABULARY[1],
        "unk_token": VOCABULARY[0],
        "model_max_length": SHAPE["max_position_embeddings"],
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }
    files = {
        "config.json": SHAPE | MODELS[kind],
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": about,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1), "utf-8")
    return folder


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what a process of the engine's environment is told, Headway's own code included."""
    told = {
        "PYTHONPATH": ROOT,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": str(SERVER_CORE),
        "OMP_NUM_THREADS": "1",
        # oneDNN compiles kernels for each number of tokens in a step, 2 to 5 ms, and keeps those
        # of some 200; GPUs have no such cost. So all are kept, and `warm_up` has them compiled.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "100000",
        # Memory that a large step gives back is faulted in again by the next: 5 % of a step of 512
        # tokens, nothing of one of 128. So it is kept, as by tcmalloc, which vLLM's own wheels
        # preload, and this where it is installed.
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "MALLOC_TOP_PAD_": str(2**28),
    }
    if library := find_library("tcmalloc_minimal"):
        told["LD_PRELOAD"] = library
    return os.environ | told | (more or {})


def command(*words: str | Path) -> list[str]:
    """Return a command of the engine's environment: `vllm` or `python`, and what follows."""
    folder = engine_folder()
    assert folder is not None, "HEADWAY_ENGINE is not set"
    return [str(folder / "bin" / str(words[0])), *map(str, words[1:])]


@dataclass(frozen=True)
class LiveServer:
    """A server that answers."""

    url: str
    log: Path


def recording_server(model: Path, log: Path, *flags: str) -> AbstractContextManager[LiveServer]:
    """Start one by the name `tiny` that writes its steps to `steps_of(log)`."""
    named = "--served-model-name", "tiny", "--scheduler-cls", RECORDER
    return live_server(model, log, *named, *flags, env={"HEADWAY_STEPS": str(steps_of(log))})


def steps_of(log: Path) -> Path:
    """Return where a server with this log records its steps."""
    return log.with_name("steps.jsonl")


@contextmanager
def live_server(
    model: Path,
    log: Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
) -> Iterator[LiveServer]:
    """Start `vllm serve`, its engine on a core of its own; it ends with the block.

    Waits until it is healthy. `flags` replace those of FLAGS or are added. Raises AssertionError
    with the end of its log where it ends or takes longer than STARTUP.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    usual = [word for pair in FLAGS.items() if pair[0] not in flags for word in pair]
    words = command("vllm", "serve", model, "--load-format", "dummy", "--host", "127.0.0.1")
    words += ["--enforce-eager"]  # compiling takes a minute of the start
    bound = ["setpriv", "--pdeathsig", "KILL"]  # it dies with the tests
    words = [*bound, "taskset", "-c", str(SERVER_CORE), *words, "--port", str(port), *usual, *flags]
    with log.open("w") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=file, env=environment(env), process_group=0
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log)
        _apart(process)
        yield LiveServer(url, log)
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    begin = time.monotonic()
    while time.monotonic() < begin + STARTUP:
        assert process.poll() is None, f"vllm serve ended: {log.read_text()[-3000:]}"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.25)
    raise AssertionError(f"vllm serve is not up after {STARTUP:g} s: {log.read_text()[-3000:]}")


def _apart(process: subprocess.Popen[bytes]) -> None:
    """Let the process that speaks HTTP run beside the client, not on the core of the engine.

    There it would stretch some steps and not others: 3 ms for each request that comes or ends.
    """
    for thread in os.listdir(f"/proc/{process.pid}/task"):
        os.sched_setaffinity(int(thread), {CLIENT_CORE})


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and all processes that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
