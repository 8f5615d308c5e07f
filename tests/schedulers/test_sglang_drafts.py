"""EAGLE with SGLang's scheduler in a scenario: what is refused, and what a run reports."""

import pytest

from headway.cli.main import main

EAGLE = "{method: eagle, num_speculative_tokens: 3, acceptance: 1"
TREE = "speculative_eagle_topk: 2, speculative_num_draft_tokens: 6"


@pytest.fixture
def run(tmp_path, capsys):
    """Run a scenario of an engine; return its exit code and what it has said."""

    def run(engine: str) -> tuple[int, str]:
        path = tmp_path / "s.yaml"
        path.write_text(
            f"model: llama-3-8b\ngpu: H100\nengine: {{{engine}}}\n"
            "workload: {num_prompts: 4, input_len: 100, output_len: 21}\n"
        )
        code = main(["run", str(path), "--out", str(tmp_path / "out")])
        told = capsys.readouterr()
        return code, told.out + told.err

    return run


@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("caching", ["true", "false"])
@pytest.mark.parametrize(("drafts", "length"), [("}", "4.00"), (f", {TREE}}}", "4.00")])
def test_all_drafts_right_bring_four_tokens_a_step(run, overlap, caching, drafts, length) -> None:
    """20 tokens after the first are 5 verified steps, of a chain and of a tree of three steps."""
    keys = f"async_scheduling: {overlap}, enable_prefix_caching: {caching}"
    code, told = run(f"name: sglang, {keys}, speculative_config: {EAGLE}{drafts}")
    assert code == 0
    (line,) = [line for line in told.splitlines() if line.startswith("Acceptance length")]
    assert line.split()[-1] == length


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            "name: sglang, speculative_config: {num_speculative_tokens: 3, acceptance: 0.5}",
            "engine.speculative_config.method: must be eagle, eagle3, mtp for sglang",
        ),
        (
            f"speculative_config: {EAGLE}, {TREE}}}",
            "engine.speculative_config.speculative_eagle_topk: is SGLang's: vLLM's drafts are a "
            "chain",
        ),
        (
            f"name: sglang, speculative_config: {EAGLE}, speculative_num_draft_tokens: 6}}",
            "engine.speculative_config.speculative_num_draft_tokens: must be "
            "num_speculative_tokens + 1 (4) where drafts are a chain",
        ),
        (
            f"name: sglang, kv_offloading_size: 4, speculative_config: {EAGLE}}}",
            "engine.speculative_config: needs kv_offloading_size: null",
        ),
        (
            f"name: sglang, speculative_config: {EAGLE}, disable_eagle_block_drop: true}}",
            "engine.speculative_config.disable_eagle_block_drop: is vLLM's, and sglang has none",
        ),
        (
            f"speculative_config: {EAGLE}, num_speculative_tokens_per_batch_size: [[1, 4, 2]]}}, "
            "data_parallel_size: 2",
            "engine.speculative_config.num_speculative_tokens_per_batch_size: vLLM 0.28 and later "
            "ignore it with data_parallel_size: leave it out",
        ),
        (
            "name: sglang, scheduling_policy: {policy: sglang, order: {policy: sjf}}, "
            f"speculative_config: {EAGLE}}}",
            "engine.speculative_config: needs an order of SGLang's own, not a policy of Headway's",
        ),
        (
            "name: sglang, scheduling_policy: {policy: sglang, speculation: 3}",
            "engine.scheduling_policy.speculation: sglang takes no such argument",
        ),
    ],
)
def test_what_cannot_be_is_refused(run, engine: str, message: str) -> None:
    code, told = run(engine)
    assert code == 2
    assert message in told
