"""Limits of the scheduler below the sizes that the model runner has: vLLM's SchedulerConfig."""

import pytest

from headway.report.vllm_serve import serve_command
from simulator.launch.keys import LaunchCommand
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError

LOAD = {"num_prompts": 60, "request_rate": 60}


def load(**engine):
    return load_scenario(
        {"model": "Qwen/Qwen3-8B", "gpu": "H100", "engine": engine, "workload": LOAD}
    )


def rows(stepwise=False, **engine):
    (log,) = run(load(**engine), stepwise=stepwise).logs
    assert len(log.step_rows)
    return bytes(log.step_rows), bytes(log.request_rows)


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ({"max_num_active_seqs": 4}, {"max_num_seqs": 4, "max_num_batched_tokens": 8192}),
        ({"max_num_scheduled_tokens": 1024}, {"max_num_batched_tokens": 1024}),
        (
            {"max_num_active_seqs": 4, "scheduling_policy": "priority"},
            {"max_num_seqs": 4, "scheduling_policy": "priority", "max_num_batched_tokens": 8192},
        ),
        (
            {"max_num_active_seqs": 4, "scheduling_policy": "preemptive"},
            {"max_num_seqs": 4, "scheduling_policy": "preemptive", "max_num_batched_tokens": 8192},
        ),
    ],
    ids=["active", "scheduled", "priority", "preemptive"],
)
def test_requests_are_scheduled_as_with_smaller_sizes(limits, sizes):
    """The memory is that of the larger ones, of which these requests need little."""
    limited = rows(**limits)
    assert limited == rows(**sizes)
    assert limited[1] == rows(stepwise=True, **limits)[1]
    assert limited != rows()


def test_the_memory_is_that_of_the_runner():
    def blocks(**engine):
        return run(load(**engine)).logs[0].num_blocks

    large = {"max_num_batched_tokens": 32_768, "max_num_scheduled_tokens": 1024}
    assert blocks(**large) == blocks(max_num_batched_tokens=32_768)
    assert blocks(max_num_batched_tokens=32_768) < blocks()


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        ({"max_num_active_seqs": 9, "max_num_seqs": 8}, "must be at most max_num_seqs (8), not 9"),
        ({"max_num_active_seqs": 9, "version": "0.30"}, "which came with 0.31.0"),
        ({"max_num_scheduled_tokens": 9000}, "must be at most max_num_batched_tokens (8192)"),
        ({"max_num_scheduled_tokens": 99}, "fewer than the requests that may run (1024)"),
        (
            {"max_num_scheduled_tokens": 5000, "enable_chunked_prefill": False},
            "is not simulated without chunked prefill",
        ),
    ],
)
def test_limits_that_contradict_are_one_line(engine, what):
    with pytest.raises(HeadwayError) as raised:
        load(**engine)
    (line,) = raised.value.messages
    assert what in line


def test_a_command_has_the_limits_and_gets_them_back():
    options = "--max-num-active-seqs 8 --max-num-scheduled-tokens 2k --max-num-queued-reqs 0"

    def read(command):
        return load_scenario({"gpu": "H100"}, [LaunchCommand(command)])

    first = read(f"vllm serve Qwen/Qwen3-8B {options}")
    assert (first.engine.most_running, first.engine.most_tokens) == (8, 2000)
    assert first.engine.max_num_queued_reqs == 0
    assert read(serve_command(first)).engine == first.engine
