"""What sampling with top-p takes, by GPU and version, beside what was measured."""

import csv
from pathlib import Path

import pytest

from simulator.core.request import Step
from simulator.costs.piecewise import PiecewiseCost
from simulator.models.gpus import find_gpu
from tests.support.costs import overhead_of, with_overhead

SAMPLING = Path(__file__).parents[2] / "calibration/measurements/h100/llama-3.1-8b/sampling.csv"
KERNELS = PiecewiseCost(dense=[[1, 1.0]])


@pytest.mark.parametrize(("gpu", "version"), [("L40S", "0.15.1"), ("A100-80GB", "0.16")])
def test_sorting_takes_what_its_passes_move_and_little_more(gpu: str, version: str) -> None:
    """Llama-3.1-8B's 128,256 logits of 32 sequences: at least what a radix sort of float32 with
    8-byte indices moves (four passes that read and write both), at most twice what the whole
    sampler does, and less than 15 % of a step that reads 16 GB of weights."""
    card = find_gpu(gpu)
    terms = overhead_of(version, asynchronous=True, gpu=gpu)
    bare, sorting = (
        with_overhead(terms, KERNELS, overlapped=True, gpu=card, sampled=sampled)
        for sampled in (False, True)
    )
    took = (
        sorting.execute(Step([], 32, 32_000)).seconds - bare.execute(Step([], 32, 32_000)).seconds
    )
    logits = 32 * 128256
    assert 4 * 24 * logits / card.bandwidth < took < 2 * 300 * logits / card.bandwidth
    assert took < 0.15 * 16.06e9 / card.bandwidth


def test_sorting_does_not_grow_with_one_over_the_bandwidth() -> None:
    """H100 has 3.9 times the bandwidth of an L40S; a logit costs 1.7 times as much on that.

    vLLM's pull request 40376 masks 64 and 128 x 131,072 logits on a B200 in 1.07 and 2.32 ms: 0.92
    of what an H100 takes without the draw, a vocabulary of 128,256 and all else equal.
    """
    terms = overhead_of("0.15.1", asynchronous=True)
    each = {gpu: terms.logit_seconds(find_gpu(gpu)) for gpu in ("L40S", "H100-80GB", "B200")}
    assert each["L40S"] < 2.5 * each["H100-80GB"]
    b200, h100 = (terms.sampling + 64 * 128256 * each[gpu] for gpu in ("B200", "H100-80GB"))
    assert b200 / h100 == pytest.approx(0.92, abs=0.03)


def test_sorting_takes_what_was_measured() -> None:
    """On an H100, launched one after the other, beyond the argmax, for 8 sequences and more."""
    terms, h100, sampler = overhead_of("0.15"), find_gpu("H100-80GB"), "top-p, sort"
    took = {
        (row["sampler"], int(row["batch"]), int(row["vocabulary"])): float(row["launched_us"])
        for row in csv.DictReader(SAMPLING.read_text().splitlines())
        if row["logits"] == "peaked"
    }
    found = [key for key in took if key[0] == sampler and key[1] >= 8]
    assert len(found) >= 6
    for _, batch, vocabulary in found:
        more = took[sampler, batch, vocabulary] - took["greedy", batch, vocabulary]
        charged = terms.sampling + batch * vocabulary * terms.logit_seconds(h100)
        assert charged == pytest.approx(more * 1e-6, rel=0.2)


@pytest.mark.parametrize(
    ("version", "sorts"),
    [("0.8.5", True), ("0.9.0", False), ("0.11.0", False), ("0.11.1", True), ("0.11", True)],
)
def test_from_0_9_to_0_11_0_flashinfer_sampled(version: str, sorts: bool) -> None:
    """A version without a patch release means the last one of it."""
    assert (overhead_of(version).sampling > 0) is sorts
