"""What a running server says of itself, and the scenario that stands for it."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.twin.remote import PATIENCE, read_text, with_session
from headway.twin.shadow import Poll, read_poll
from simulator.models.load import load_model
from simulator.scenario.load import load_scenario
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError

CALM = 1.0  # s between the two looks that tell whether others use it
UNTOLD = {
    "model": "its name or the path of its config.json",
    "gpu.name": "what it runs on, as `headway memory` knows it; CPU for one without a GPU",
    "engine.max_num_seqs": "its --max-num-seqs",
    "engine.max_num_batched_tokens": "its --max-num-batched-tokens",
}
"""Keys of a scenario that no address of a vLLM server tells, and nobody should guess."""
ASSUMED = (
    "dtype",
    "async_scheduling",
    "enable_chunked_prefill",
    "scheduling_policy",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)
"""Others that it does not tell: vLLM's default where nobody says."""


@dataclass(frozen=True)
class Server:
    """A running vLLM."""

    url: str  # without /v1
    version: str
    model: str  # by which requests name it
    root: str  # from where it was loaded
    max_model_len: int
    cache: Mapping[str, str]  # labels of vllm:cache_config_info

    @property
    def told(self) -> dict[str, object]:
        """The keys of a scenario that it tells."""
        found: dict[str, object] = {
            "engine.version": self.version,
            "engine.max_model_len": self.max_model_len,
        }
        for key, label in (
            ("engine.block_size", "block_size"),
            ("engine.num_gpu_blocks_override", "num_gpu_blocks"),
        ):
            if self.cache.get(label, "").isdigit():
                found[key] = int(self.cache[label])
        if (word := self.cache.get("enable_prefix_caching")) in {"True", "False"}:
            found["engine.enable_prefix_caching"] = word == "True"
        return found


def ask(url: str) -> Server:
    """Ask who is there; HeadwayError in a line where it is no vLLM, or answers none."""
    root = url.rstrip("/").removesuffix("/v1")
    version = str(_mapping(root, "/version").get("version", ""))
    models = _mapping(root, "/v1/models").get("data")
    first = models[0] if isinstance(models, list) and models else {}
    if not isinstance(first, dict) or not isinstance(first.get("id"), str):
        raise HeadwayError(f"--server: {root}/v1/models: names no model")
    text = _get(root, "/metrics")
    _poll(root, text)
    caches = re.findall(r"^vllm:cache_config_info\{(.*)\}", text, re.MULTILINE)
    if len(caches) != 1:
        raise HeadwayError(
            f"--server: {root}/metrics: has {len(caches)} engines in vllm:cache_config_info; one "
            "engine is calibrated (with --data-parallel-size 1)"
        )
    release = re.match(r"v?(\d+\.\d+(?:\.\d+)?)", version)
    length = first.get("max_model_len")
    if release is None or not isinstance(length, int):
        what = "max_model_len" if release else f"the version {version!r}"
        raise HeadwayError(
            f"--server: {root}: is no release of vLLM: {what} is not as vLLM says it"
        )
    labels = dict(re.findall(r'(\w+)="([^"]*)"', caches[0]))
    name = str(first.get("root") or first["id"])
    return Server(
        root, release[1], model=first["id"], root=name, max_model_len=length, cache=labels
    )


def look(root: str) -> Poll:
    """Read the counters and gauges of /metrics."""
    return _poll(root, _get(root, "/metrics"))


def check_calm(root: str) -> None:
    """Raise HeadwayError where others are using the server."""
    before = look(root)
    time.sleep(CALM)
    after = look(root)
    there = int(max(before.there, after.there))
    if there or after.finished > before.finished:
        raise HeadwayError(
            f"--server: {root}: is busy with others' requests ({there} in it, "
            f"{after.finished - before.finished:.0f} more ended within {CALM:.0f} s): calibrate a "
            "server that nobody else uses"
        )


def given_keys(path: Path | None, overrides: Sequence[str]) -> dict[str, object]:
    """Return what the user says of a server, by dotted keys."""
    import yaml

    given = _flat(yaml.safe_load(path.read_text("utf-8"))) if path is not None else {}
    for one in overrides:
        key, _, value = one.partition("=")
        parsed = yaml.safe_load(value)
        given |= {key: parsed} | _flat(parsed, f"{key}.")
    return given


def scenario_of(server: Server, path: Path | None, overrides: Sequence[str]) -> Scenario:
    """Make the scenario of a server: what it tells, and what the user says beside.

    HeadwayError names what neither tells, and what the two tell differently.
    """
    given = given_keys(path, overrides)
    told = server.told
    wrong = [
        f"{key}: the server says {told[key]}, the scenario {given[key]}"
        for key in told
        if key in given and key != "engine.version" and given[key] != told[key]
    ]
    if "model" not in given and _is_known(server.root):
        told["model"] = server.root
    if "gpu" in given and "gpu.name" not in given and not isinstance(given["gpu"], dict):
        given["gpu.name"] = given["gpu"]
    wrong += [
        f"{key}: the server does not tell it: give --set {key}=..., {what}"
        for key, what in UNTOLD.items()
        if key not in given and key not in told
    ]
    if wrong:
        raise HeadwayError(wrong)
    name = re.sub(r"[^\w.-]+", "-", Path(server.model).name) or "server"
    base: Any = path if path is not None else {"name": name}
    sets = [f"{key}={json.dumps(value)}" for key, value in told.items()]
    return load_scenario(base, [*overrides, *sets], own_code=False)


def _is_known(name: str) -> bool:
    try:
        load_model(name, Path())
    except ValueError:
        return False
    return True


def _flat(raw: object, above: str = "") -> dict[str, object]:
    """Return the values of nested mappings by their dotted keys."""
    found: dict[str, object] = {}
    for key, value in (raw if isinstance(raw, dict) else {}).items():
        found[f"{above}{key}"] = value
        found |= _flat(value, f"{above}{key}.")
    return found


def _poll(root: str, text: str) -> Poll:
    try:
        return read_poll(text, time.monotonic())
    except HeadwayError:
        raise HeadwayError(
            f"--server: {root}: is no vLLM: its /metrics have no vllm:num_requests_running"
        ) from None


def _mapping(root: str, path: str) -> dict[str, Any]:
    """Read an object of JSON from an address."""
    text = _get(root, path)
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise HeadwayError(
            f"--server: {root}{path}: is no vLLM: not JSON, but {' '.join(text.split())[:40]!r}"
        )
    return found


def _get(root: str, path: str) -> str:
    """Read what an address answers; HeadwayError in a line where that is no 200."""

    async def answer(session: Any) -> tuple[int, str]:
        async with session.get(root + path) as response:
            return response.status, await read_text(response)

    status, text = with_session("--server", root, PATIENCE, answer)
    if status == 200:
        return text
    locked = status in {401, 403}
    hint = ": the server wants a key: set OPENAI_API_KEY" if locked else ""
    what = "" if locked or path != "/version" else "is no vLLM: "
    raise HeadwayError(f"--server: {root}{path}: {what}answers {status}{hint}")
