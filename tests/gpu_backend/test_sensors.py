"""Clock and power of a GPU, as a program that runs beside the measurement tells them."""

from pathlib import Path
from time import monotonic, sleep

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'headway[gpu]'")

from gpu_backend import sensors as module  # noqa: E402
from gpu_backend.sensors import NO_READING, Reading, Sensors, parse  # noqa: E402


def test_lines() -> None:
    """Two numbers; what is not supported is not known, and neither is another program's word."""
    assert parse("1980, 431.25\n") == Reading(1980.0, 431.25)
    assert parse("345, [N/A]") == Reading(345.0, None)
    assert parse("No devices were found") == NO_READING
    assert parse("a, b, c") == NO_READING


def test_on_a_cpu_nothing_is_known_and_nothing_runs() -> None:
    with Sensors(torch.device("cpu")) as sensors:
        assert sensors.latest == NO_READING
        assert sensors._process is None


def test_the_latest_line_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in writes two lines and waits; it is gone with the block."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$1" > "$0.asked"\necho "345, 80.5"\necho "1980, 600"\n'
                       "exec sleep 60\n")  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(module, "gpu_id", lambda device: "GPU-7")
    with Sensors(torch.device("cuda")) as sensors:
        until = monotonic() + 20
        while sensors.latest.sm_mhz != 1980 and monotonic() < until:
            sleep(0.01)
        assert sensors.latest == Reading(1980.0, 600.0)
    assert sensors._process is not None
    assert sensors._process.returncode is not None
    assert (tmp_path / "nvidia-smi.asked").read_text() == "--id=GPU-7\n"


def test_without_the_program_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(module, "gpu_id", lambda device: "GPU-7")
    with Sensors(torch.device("cuda")) as sensors:
        assert sensors.latest == NO_READING
