"""Policies in a real vLLM's scheduler decide as in the simulation, without a model that runs."""

import subprocess

import pytest

from tests.support.live_vllm import command, environment

pytestmark = pytest.mark.engine


def test_scenarios_with_every_policy_agree() -> None:
    """Of these, 17 has clients whose answers end by stop tokens, under a policy that counts."""
    words = "-W", "ignore", "-m", "headway.vllm.parity", "--seed", "1", "--first", "10"
    done = subprocess.run(
        command("python", *words, "--count", "27"),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].endswith(": 0 scenarios differ")
