"""`engine.version`: rules and defaults of the vLLM that one runs."""

import json
from pathlib import Path

import pytest

from headway.cli.main import main
from simulator.core.engine_config import EngineConfig
from simulator.scenario.load import check_scenario
from simulator.scenario.resolve import engine_specs
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from simulator.util.yaml_lines import SourceMap


def check(**blocks: object) -> Scenario:
    return check_scenario(blocks, SourceMap("s.yaml", {}))


def engine(gpu: str = "A100-80GB", **keys: object) -> EngineConfig:
    return check(engine=keys, gpu={"name": gpu}).engine


@pytest.mark.parametrize(
    ("version", "asynchronous", "share", "reserves"),
    [
        ("0.10.2", False, 0.9, False),
        ("0.13.0", False, 0.9, False),
        ("0.14", True, 0.9, False),
        ("0.18.1", True, 0.9, False),
        ("0.19.0", True, 0.9, True),
        ("0.20.2", True, 0.92, True),
        ("v0.33.0", True, 0.92, True),
    ],
)
def test_a_version_has_its_defaults(version, asynchronous, share, reserves) -> None:
    """EngineArgs, VllmConfig and SchedulerConfig of these releases."""
    found = engine(name="vllm", version=version)
    assert found.async_scheduling == asynchronous
    assert found.gpu_memory_utilization == share
    assert found.scheduler_reserve_full_isl == reserves
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (256, 2048)


@pytest.mark.parametrize(
    ("gpu", "version", "tokens"),
    [("H100-80GB", "0.11", 8192), ("B200", "0.27.1", 8192), ("B200", "0.28", 16384)],
)
def test_large_gpus_have_larger_steps(gpu: str, version: str, tokens: int) -> None:
    found = engine(gpu, name="vllm", version=version)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (1024, tokens)


def test_sizes_that_nobody_gave_fit_the_others() -> None:
    """As EngineArgs puts them right; what is given stands."""
    assert engine(name="vllm", max_num_batched_tokens=100).max_num_seqs == 100
    assert engine(name="vllm", max_num_seqs=2, max_model_len=500).max_num_batched_tokens == 1000
    whole = {"name": "vllm", "enable_chunked_prefill": False, "max_model_len": 5000}
    assert engine(**whole).max_num_batched_tokens == 5000
    small = engine(name="vllm", version="0.11.0", max_num_seqs=2, max_model_len=500)
    assert small.max_num_batched_tokens == 2048
    with pytest.raises(HeadwayError, match="must be at least max_num_seqs"):
        engine(name="vllm", max_num_batched_tokens=100, max_num_seqs=200)


def test_of_the_textbook_a_version_says_rules_alone() -> None:
    """And switches off the options that it lacks."""
    plain, old = engine(name="textbook"), engine(name="textbook", version="0.18")
    assert plain.scheduler_reserve_full_isl
    assert not old.scheduler_reserve_full_isl
    assert plain.prefix_cache_retention_interval == 0
    off = {"scheduler_reserve_full_isl": False, "prefix_cache_retention_interval": None}
    assert old == plain.model_copy(update={"version": "0.18", **off})


def test_a_version_may_look_like_a_number() -> None:
    assert engine(version=0.15).version == "0.15"


@pytest.mark.parametrize("version", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("name", ["vllm", "textbook", "vllm-v0"])
def test_a_number_that_may_have_lost_a_zero_is_refused(version: float, name: str) -> None:
    """YAML takes 0.20 for 0.2, and vLLM has had both."""
    with pytest.raises(HeadwayError, match=rf"engine.version: {version} may .* '{version}0' in q"):
        engine(version=version, name=name)


@pytest.mark.parametrize("version", ["0.34", "0.7", "1.0", "latest", 3, 0.4])
@pytest.mark.parametrize("name", [{}, {"name": "vllm"}])
def test_an_unknown_version_is_told_in_one_line(version: object, name: dict) -> None:
    with pytest.raises(HeadwayError) as told:
        engine(version=version, **name)
    (line,) = told.value.messages
    assert line.startswith(
        "s.yaml: engine.version: must be a version of vLLM whose rules are known"
    )
    assert "0.10 to 0.33" in line


@pytest.mark.parametrize(
    ("version", "key", "value", "since"),
    [
        ("0.18", "scheduler_reserve_full_isl", True, "0.19.0"),
        ("0.23", "watermark", 0.1, "0.24.0"),
        ("0.28", "prefix_cache_retention_interval", 0, "0.29.0"),
        ("0.30", "long_prefill_token_threshold_adaptive", True, "0.31.0"),
        ("0.32", "prefill_schedule_interval", 2, "0.33.0"),
    ],
)
def test_an_option_that_came_later_is_told(version, key, value, since) -> None:
    """From that release on it is taken."""
    with pytest.raises(HeadwayError) as told:
        engine(version=version, **{key: value})
    assert told.value.messages == [
        f"s.yaml: engine.{key}: vLLM {version} has no such rule, which came with {since}: leave "
        "it out"
    ]
    assert getattr(engine(version=since, **{key: value}), key) == value


@pytest.mark.parametrize(
    ("model", "version", "told"),
    [
        ("qwen3-30b-a3b", "0.23.0", ", which came with 0.24.0"),
        ("qwen3-30b-a3b", "0.24.0", None),
        ("llama-3-8b", "0.32.0", " for ranks of a dense model"),
        ("llama-3-8b", "0.33.0", None),
    ],
)
def test_ranks_in_lock_step_hold_prefill_back_from_an_older_release_on(
    model: str, version: str, told: str | None
) -> None:
    """Ranks of a dense model do as one engine does."""
    block = {"name": "vllm", "version": version, "prefill_schedule_interval": 2}
    raw = {
        "model": model,
        "gpu": {"name": "H100-80GB", "count": 2},
        "engine": block | {"data_parallel_size": 2},
        "cost": {"kind": "roofline"},
        "workload": {"num_prompts": 1, "request_rate": 1, "input_len": 8, "output_len": 2},
    }
    if told is None:
        assert check_scenario(raw, SourceMap("s.yaml", {})).engine.prefill_schedule_interval == 2
        return
    with pytest.raises(HeadwayError) as error:
        check_scenario(raw, SourceMap("s.yaml", {}))
    (line,) = error.value.messages
    where = "s.yaml: engine.prefill_schedule_interval"
    assert line == f"{where}: vLLM {version} has no such rule{told}: leave it out"


@pytest.mark.parametrize(
    ("version", "last"),
    [("0.19.9", "0.19.1"), ("v0.19.2", "0.19.1"), ("0.13.1", "0.13.0"), ("0.33.1", "0.33.0")],
)
def test_a_release_that_there_is_not_is_refused(version: str, last: str) -> None:
    with pytest.raises(HeadwayError) as told:
        engine(version=version)
    (line,) = told.value.messages
    what, minor = version.removeprefix("v"), last.rpartition(".")[0]
    assert line == (
        f"s.yaml: engine.version: must be a release of vLLM: {what} is not known, "
        f"of {minor} the last is {last}"
    )


def test_the_v_of_a_tag_is_left_out() -> None:
    assert engine(version="v0.19.1") == engine(version="0.19.1")
    assert engine(version="0.10.1.1").version == "0.10.1.1"


def test_v0_only_has_versions_that_had_it() -> None:
    """They say what it adds to its kernels, and nothing of V1's rules."""
    assert engine(name="vllm-v0", version="0.6.3").scheduler_reserve_full_isl
    with pytest.raises(HeadwayError, match=r"that had the V0 engine, up to 0\.10\.2, not '0\.12'"):
        engine(name="vllm-v0", version="0.12")
    with pytest.raises(HeadwayError, match=r"0\.6\.99 is not known, of 0\.6 the last is 0\.6\.6"):
        engine(name="vllm-v0", version="0.6.99")


@pytest.mark.parametrize("version", ["0.5.23", "0.19"])
def test_other_engines_have_no_version(version: str) -> None:
    """They are simulated after one release, and what vLLM's version says is not theirs."""
    with pytest.raises(HeadwayError) as told:
        engine(name="sglang", version=version)
    assert told.value.messages == [
        "s.yaml: engine.version: names a vLLM, and sglang is one system alone (SGLang 0.5.23): "
        "leave it out"
    ]


PRESSURE = {
    "engine": {"num_gpu_blocks_override": 60, "version": "0.11.0"},
    "workload": {"num_prompts": 20, "request_rate": 50, "input_len": 100, "output_len": 100},
}


def test_summary_and_report_say_whose_rules(tmp_path: Path, capsys) -> None:
    """The newest known, where nobody says; none, where vLLM's scheduler is not at work."""
    path = tmp_path / "s.yaml"
    path.write_text("workload: {num_prompts: 2}\n")
    told = {
        (): "0.33 (newest known)",
        ("--set", "engine.version=0.19.1"): "0.19.1",
        ("--set", "engine.scheduling_policy=static"): None,
        ("--set", "engine=sglang"): None,
    }
    for settings, version in told.items():
        assert main(["run", str(path), *settings, "--out", str(tmp_path / "out")]) == 0
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert summary["headway"]["vllm_version"] == version
        shown = capsys.readouterr().out
        assert (f"Engine: vLLM {version}\n" in shown) == (version is not None)
    assert main(["report", str(tmp_path / "out")]) == 0


def test_groups_of_a_cluster_may_run_different_versions() -> None:
    scenario = check(
        cluster={"groups": {"old": {"engine": {"version": "0.15"}}, "new": {}}},
        workload={"num_prompts": 4},
    )
    assert run(scenario).summary()["headway"]["vllm_version"] == "0.15, 0.33 (newest known)"


def test_a_group_of_another_engine_has_not_the_version_of_vllm() -> None:
    """What stands above all groups is for those that are vLLM."""
    other = {"old": {}, "other": {"engine": {"name": "sglang"}}}
    scenario = check(engine={"version": "0.15"}, cluster={"groups": other})
    assert scenario.of_group("old").engine.version == "0.15"
    assert scenario.of_group("other").engine.version is None


def test_the_installed_vllm_is_of_its_own_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scheduler decides: another version's rules would not be followed."""
    from headway.vllm.assemble_installed import _check_installed

    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.33.0")
    for version in ("0.33", None):
        _check_installed(engine_specs(check(engine={"version": version}))[""])
    with pytest.raises(ValueError, match=r"is 0\.19, and vLLM 0\.33\.0 is installed"):
        _check_installed(engine_specs(check(engine={"version": "0.19"}))[""])


def test_the_first_chunk_is_enough_before_0_19() -> None:
    """The same requests under too few blocks: boarding on a chunk means going again."""
    pressure = {
        "engine": {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 256},
        "workload": {"num_prompts": 40, "request_rate": 50, "input_len": 300, "output_len": 60},
    }
    found = {}
    for version in ("0.18", "0.19", None):
        scenario = check(**pressure | {"engine": pressure["engine"] | {"version": version}})
        found[version] = run(scenario).summary()["headway"]["preemptions"]
    assert found["0.18"] > found["0.19"]


def test_priorities_under_pressure_are_refused_before_0_11_1(tmp_path: Path, capsys) -> None:
    """One line, exit code 2, and no file; without pressure they are simulated."""
    path = tmp_path / "s.yaml"
    block = json.dumps(
        PRESSURE["engine"] | {"scheduling_policy": "priority", "enable_prefix_caching": True}
    )
    load = json.dumps(PRESSURE["workload"] | {"clients": 4, "priorities": [3, 2, 1, 0]})
    path.write_text(f"engine: {block}\nworkload: {load}\n")
    out = tmp_path / "out"
    assert main(["run", str(path), "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert told.count("headway: error: ") == 1
    assert "engine.version: what vLLM before 0.11.1 does" in told
    assert not out.exists()
    for settings in ("engine.version=0.11.1", "engine.num_gpu_blocks_override=1000"):
        assert main(["run", str(path), "--set", settings, "--out", str(out)]) == 0
