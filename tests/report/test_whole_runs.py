"""The band of whole runs that stands beside that of steps."""

import csv
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

import pytest

from headway.report import text
from headway.report.text import cost_lines
from headway.report.whole_runs import LONG, blind

BLIND = Path(text.__file__).with_name("blind.csv")
PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
LLAMA, MIXTRAL = "llama-3-8b.a100.bf16", "mixtral-8x7b.h100.bf16"


def band(
    profile: str,
    prompt: float,
    unmeasured: str | None = None,
    engines: Sequence[Mapping[str, object]] = (),
) -> str:
    gauges = {"profile": profile, "step_times": {"unmeasured": unmeasured}, "mean_prompt": prompt}
    gauges |= {"engines": engines}
    told = "\n".join(cost_lines([""], [gauges])).replace("\n  ", " ").splitlines()
    return next((line for line in told if line.startswith("Whole runs: ")), "")


@pytest.mark.parametrize(
    ("profile", "prompt", "row", "blind"),
    [
        (LLAMA, LONG - 1, "|run: dense|", ": dense models | "),
        (LLAMA, LONG, "|run: dense, long prompts|", ": dense models | "),
        (MIXTRAL, LONG, "|run: experts|", "experts on NVIDIA | "),
    ],
)
def test_a_kind_of_run_has_the_errors_of_the_campaign(profile, prompt, row, blind) -> None:
    """Those of docs/accuracy.md, which `make accuracy` writes; blind runs are of its own table."""
    told, page = band(profile, prompt), PAGE.read_text()
    (line,) = (line for line in page.splitlines() if line.startswith(row))
    metrics = ("E2EL", "TPOT", "TTFT", "TTFT P99")
    for metric, cell in zip(metrics, line.split("|")[2:], strict=False):
        if runs := cell.strip():
            errors, _, count = runs.rstrip(")").rpartition("/")
            ninth = float(errors.split(", ")[1].split(" ")[0])
            said = f" % in {metric} ({count} runs)"
            assert any(f"{ceil(ninth + half)}{said}" in told for half in (0, 0.05))
    first, study = told.rpartition("first scores (docs/accuracy.md): ")[2].split(
        "; of 38 other runs "
    )
    assert first.removesuffix(" %") in page.partition(blind)[2]
    assert study == "E2EL 11.3, TTFT 14.5, ITL 8.3 %"
    assert "; in sample) are off by less than " in told


def test_runs_by_data_sheet_and_by_costs_of_ones_own() -> None:
    lacks = "kernels of llama-3-8b on MI300X"
    for profile in ("roofline", "llama-3-8b.a100.bf16 scaled to A100-80GB-PCIe"):
        said = band(profile, 100.0, lacks)
        assert "(by data sheet; in sample) are off by less than 12 % in E2EL (27 runs), " in said
        assert " 16 % in TPOT (155 runs)" in said
        assert said.endswith("; by more on a GPU without any measured kernels")
    assert "|run: by data sheet|2.7, 11.9 (27)|4.0, 15.0 (155)|" in PAGE.read_text()
    assert not band("linear", 100.0)
    assert not band("tiny-test.cpu.fp32", 100.0)  # the campaign has GPUs


def engine(name: str, follows: str, gpu: str, **keys: object) -> dict[str, object]:
    return {"name": name, "follows": follows, "gpu": gpu, "groups": [], "set": keys}


def test_runs_are_judged_by_gpu_engine_and_release_or_it_is_said_that_none_was() -> None:
    """The campaign has vLLM without drafts alone."""
    told = band(LLAMA, 100.0, engines=[engine("vllm", "vLLM 0.15.1", "B200")])
    page = PAGE.read_text()
    for kind in ("GPU: B200", "release: vLLM 0.15"):
        (row,) = (line for line in page.splitlines() if line.startswith(f"|{kind}|"))
        errors, _, runs = row.split("|")[3].strip(")").rpartition("/")
        ninth, name = float(errors.split(", ")[1].split()[0]), kind.partition(": ")[2]
        said = f" % in TPOT ({runs} runs), "
        assert any(f"; with {name}: {ceil(ninth + half)}{said}" in told for half in (0, 0.05))
    assert "no run was judged" not in told
    drafts = {"method": "ngram"}
    other = [engine("sglang", "SGLang 0.5.23", "MI300X", speculative_config=drafts)]
    assert band("roofline", 1.0, "kernels of llama-3-8b on MI300X", other).endswith(
        "; with MI300X: no run was judged; with SGLang, drafts: no run was judged; "
        "with SGLang 0.5: no run was judged"
    )
    assert "; with vLLM 0.33: no run was judged" in band(
        LLAMA, 1.0, engines=[engine("vllm", "vLLM 0.33 (newest known)", "B200")]
    )


@pytest.mark.parametrize(("share", "said"), [(0.24, False), (0.25, True), (None, False)])
def test_runs_that_wait_for_the_host_may_be_off_by_a_factor_of_two(share, said) -> None:
    """500 requests at once to Qwen3-0.6B took 1.7 times as long as predicted, in a blind set."""
    for profile in (LLAMA, "roofline scaled to H100-80GB kernels"):
        gauges = {"profile": profile, "host_share": share, "mean_prompt": 100.0}
        told = " ".join(" ".join(cost_lines(["a", "b"], [gauges, gauges])).split())
        assert told.count("on others runs take half to twice") == said


def test_medians_of_blind_runs_are_those_of_the_page() -> None:
    """They were scored once and typed; each says of which row it is."""
    page = PAGE.read_text("utf-8")
    rows = {
        "dense": "MI300X: dense models",
        "experts": "mixtures of experts on NVIDIA",
        "study": "7 models on H100, A100 and L40S",
    }
    for kind, named in rows.items():
        assert f"{named} | {blind(kind).removesuffix(' %')} |" in page
    with BLIND.open(encoding="utf-8") as file:
        assert all(f"| {row['source']} |" in page for row in csv.DictReader(file))
