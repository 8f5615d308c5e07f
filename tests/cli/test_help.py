"""Help and version, and what is imported for them and for a run."""

import re

import pytest

from headway.cli.main import main
from simulator.util.version import __version__
from tests.support.commands import headway, python


def test_help_has_a_line_for_every_command(capsys):
    """And so has the command alone."""
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    for command in ("run", "compare", "memory", "trace"):
        assert re.search(rf"{command} +[A-Z]", told)
    assert main([]) == 0
    assert capsys.readouterr().out == told


@pytest.mark.parametrize("verb", ["run", "plan", "plot", "serve", "shadow", "calibrate"])
def test_help_writes_seconds_out(capsys, monkeypatch, verb):
    """`s of each stretch` was read twice; after a number and at a line's end it is read once."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main([verb, "--help"]) == 0
    told = capsys.readouterr().out
    assert not re.findall(r"(?<!\d) s (?:of|until|before|after|between|in|since)\b.*", told)


def test_version(capsys):
    """The package's."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_help_and_version_need_none_of_the_heavy_packages():
    """They answer at once: numpy, pydantic and simpy stay unloaded."""
    code = (
        "import sys; from headway.cli.main import main; main(sys.argv[1:]); "
        "print({'numpy', 'pydantic', 'simpy', 'yaml'} & set(sys.modules))"
    )
    verbs = ("run", "init", "memory", "trace")
    for arguments in (["--help"], ["--version"], *([verb, "--help"] for verb in verbs)):
        assert python("-c", code, *arguments).stdout.endswith("set()\n")


def test_a_run_needs_no_pandas_matplotlib_or_scipy():
    """Each of them costs more than the simulation."""
    code = (
        "import sys; from headway.cli.main import main; main(['run', 'small.yaml', '--quiet']); "
        "print({'pandas', 'matplotlib', 'scipy', 'rich.progress'} & set(sys.modules))"
    )
    assert python("-c", code).stdout == "set()\n"


def test_a_run_imports_the_policy_and_the_cost_that_it_names_alone():
    """To define all that a scenario may name takes as long as a small run."""
    code = (
        "import sys; from headway.cli.main import main; main(['run', 'small.yaml', '--quiet']); "
        "print({'simulator.schedulers.sglang.scheduler', 'simulator.schedulers.vllm_v0', "
        "'simulator.kv_cache.radix_cache', 'simulator.costs.split', 'simulator.workload.traces', "
        "'simulator.features.drafts.as_sums'} & set(sys.modules))"
    )
    assert python("-c", code).stdout == "set()\n"


def test_memory_needs_no_cost_of_a_step_and_no_blocks():
    """What fits depends on neither; they took a third of its time."""
    code = (
        "import sys; from headway.cli.main import main; "
        "main(['memory', '--model', 'llama-3-8b', '--gpu', 'L4', '--max-model-len', '4096']); "
        "print({'simulator.build.settle_cost', 'simulator.costs.piecewise', "
        "'simulator.costs.roofline', 'simulator.build.assemble_scheduler', "
        "'simulator.schedulers.vllm.async_scheduler'} & set(sys.modules))"
    )
    assert python("-c", code).stdout.endswith("set()\n")


def test_the_module_passes_on_arguments_and_exit_code():
    """`python -m headway` is `headway`."""
    done = headway("--version")
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")
    done = headway("run", "none.yaml")
    assert (done.returncode, done.stderr) == (2, "headway: error: none.yaml: no such file\n")
