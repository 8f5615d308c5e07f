"""Coefficients that recorded steps tell: spans of lone requests, polls of a server."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import yaml

from headway.planning.sensitivity import HOST
from simulator.costs.linear import Fitted
from simulator.costs.overhead import FILE
from simulator.costs.profile import PROFILES, read_profile
from simulator.workload.workload import FRONTENDS

OVERHEADS = yaml.safe_load(FILE.read_text("utf-8"))
LAYERS = 80  # of Llama-3.3-70B


def kernels(name: str) -> Fitted:
    """The cost of the kernels alone."""
    return read_profile(PROFILES / f"{name}.yaml").cost


def lone(data: Path, name: str) -> pd.DataFrame:
    """The requests of a recorded run, but the first, that met no other in the engine."""
    table = pd.read_csv(data / "e2e" / f"isim__H100__{name}__requests.csv.gz")
    ends = table["arrival_s"] + table["e2e_s"]
    quiet = (table["arrival_s"] > ends.cummax().shift()) & (
        ends < table["arrival_s"].shift(-1, fill_value=np.inf)
    )
    return table[quiet]


@pytest.mark.parametrize("name", ["llama2-7b__train", "codellama-34b__prefillheavy_mbt4096"])
def test_lone_requests_are_on_their_way_for_so_long(data: Path, name: str) -> None:
    """vLLM 0.11's spans: TTFT less queue and prefill."""
    spans = lone(data, name)
    assert len(spans) >= 20
    way = spans["ttft_s"] - spans["queue_s"] - spans["prefill_s"]
    assert way.median() == pytest.approx(FRONTENDS["server"].latency, rel=0.06)


def test_a_lone_decode_of_a_synchronous_engine_waits_for_its_host(data: Path) -> None:
    """The spans' mean step of one sequence, less its kernels, as far as hosts differ."""
    spans, cost = lone(data, "llama2-7b__train"), kernels("llama-2-7b.h100.bf16")
    waits = []
    for prompt, answer, tpot in spans[["input_tokens", "output_tokens", "tpot_s"]].to_numpy():
        if answer > 1:
            context = np.arange(prompt + 1, prompt + answer).astype(np.int64)
            waits.append(tpot - cost.decode_seconds(np.ones_like(context), context).mean())
    terms = OVERHEADS["0.11"]["synchronous"]
    assert np.median(waits) == pytest.approx(terms["step"] + terms["per_sequence"], abs=HOST)


def polled(data: Path) -> npt.NDArray[np.float64]:
    """Seconds in which 64 clients ran on a B200: a row of each second's steps.

    The steps' mean time less their kernels', the tokens of the longest sequence, and the prompts
    that ended in them; the weight is how many steps there were.
    """
    name = "inferencex__B200__llama33-70b-nvfp4__tp1_c64"
    asked, server = (
        pd.read_csv(data / "e2e" / f"{name}__{one}.csv.gz") for one in ("requests", "server")
    )
    first, last = (asked["start_s"] + asked[one] / 1e3 for one in ("ttft_ms", "latency_ms"))
    cost, rows = kernels("llama-3-70b.b200.nvfp4-kvfp8"), []
    polls: Any = server.sort_values("relative_time_sec").itertuples()
    before = next(polls)
    for poll in polls:
        since, now = before.relative_time_sec, poll.relative_time_sec
        tokens = poll.generation_tokens_total - before.generation_tokens_total
        steady = poll.num_requests_running == before.num_requests_running == 64
        before = poll
        if not steady or poll.num_requests_waiting or tokens <= 0 or now - since > 2:
            continue
        middle = (since + now) / 2
        there = (first <= middle) & (last > middle)
        share = (middle - first[there]) / (last[there] - first[there])
        context = asked["input_num_tokens"][there] + share * asked["output_num_tokens"][there]
        steps = tokens / 64
        read = np.array([int(64 * context.mean())])
        alone = float(cost.decode_seconds(np.array([64]), read)[0])
        prompts = ((first > since) & (first <= now)).sum() / steps
        rows.append([(now - since) / steps - alone, context.max(), prompts, steps])
    return np.array(rows)


def test_polls_tell_what_a_longest_sequence_and_a_prompt_add_to_a_step(data: Path) -> None:
    """A straight line through 900 seconds; a prompt may have ended in the second before."""
    found = polled(data)
    assert len(found) > 800
    rests, longest, prompts, steps = found.T
    lines = np.stack([np.ones(len(found)), longest, prompts], 1)
    for _ in range(2):  # the second time without what is far off
        weight = np.sqrt(steps)[:, None]
        line = np.linalg.lstsq(lines * weight, rests * weight[:, 0], rcond=None)[0]
        off = np.abs(rests - lines @ line)
        lines, rests, steps = (one[off < 4.5 * np.median(off)] for one in (lines, rests, steps))
    terms = OVERHEADS["0.14"]["gpus"]["B200 fp8 cache"]
    assert line[1] == pytest.approx(LAYERS * terms["key_per_layer"], rel=0.03)
    assert line[2] == pytest.approx(LAYERS * terms["prompt_per_layer"], rel=0.15)
