"""Coefficients that tables at hand have, derived again: sums by NCCL, products of an A6000."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest
import yaml

from simulator.costs.overhead import FILE
from simulator.costs.roofline import FEW_LANES, GA102
from simulator.models.gpus import GPUS
from simulator.models.load import load_model
from tools.profiles.aiconfigurator import AllReduce
from tools.profiles.tables import GPU_TABLES

SIZE = np.array([16.0 * (1 << 20)])  # bytes of a sum of a prompt
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOKENS = 2048


def longer_by_nccl(data: Path, key: str, gpus: int) -> float:
    """Seconds that NCCL takes longer than today's vLLM in the two sums of a layer."""
    (tables,) = [one for one in GPU_TABLES if one.key == key]
    sums = AllReduce(data, tables, gpus)
    curve = sums._nccl(data, tables, gpus)
    assert curve is not None
    return 2 * float((np.interp(SIZE, *curve) - sums.seconds(SIZE))[0])


def test_nccl_takes_so_much_longer_in_a_layer(data: Path) -> None:
    """On B200 from four GPUs on, where it is the mean of four's and eight's; on H200 of eight."""
    terms = yaml.safe_load(FILE.read_text("utf-8"))["0.9"]["gpus"]
    h200, b200 = ({n: longer_by_nccl(data, key, n) for n in (4, 8)} for key in ("h200", "b200"))
    assert terms["H200"]["nccl_per_layer"] == pytest.approx(h200[8], rel=0.03)
    assert h200[4] < 0.2 * h200[8]
    assert "nccl_ranks" not in terms["H200"]
    assert terms["B200"]["nccl_per_layer"] == pytest.approx((b200[4] + b200[8]) / 2, rel=0.03)
    assert terms["B200"]["nccl_ranks"] == 4
    assert b200[4] > 0.7 * b200[8]


def test_four_gpus_on_pcie_4_reach_few_bytes_a_second() -> None:
    """67.1 MB in 11.4 ms on RTX 4090s and in 11.6 ms on A100s (besthub.dev, vLLM 0.6.6)."""
    passed = 2 * 3 / 4 * 67.1e6
    assert pytest.approx(passed / np.mean([11.4e-3, 11.6e-3]), rel=0.01) == FEW_LANES


def test_chips_whose_clocks_give_way_reach_so_much_of_their_data_sheet(data: Path) -> None:
    """2,048 tokens in the products of a layer of Llama-3.1-8B on an A6000."""
    table = data / "profiles/llmservingsim_v0/A6000__meta-llama__Llama-3.1-8B__tp1__layers.csv.gz"
    with gzip.open(table, "rt") as lines:
        took = {
            row["layer_name"]: float(row["latency(ns)"]) / 1e9
            for row in csv.DictReader(lines)
            if int(row["input"]) == TOKENS
        }
    model = load_model("llama-3-8b")
    weights = model.matrix_bytes(0, None) / model.num_hidden_layers
    reached = 2 * TOKENS * weights / sum(took[name] for name in PRODUCTS)
    share = reached / GPUS["A6000"].bf16_flops
    (told,) = set(GA102.values())
    assert told == pytest.approx(share, rel=0.01)
