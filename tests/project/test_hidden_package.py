"""A user's `simulator.py` that Python finds before Headway's package."""

import os
import subprocess
import sys
from pathlib import Path

PATHS = ("PYTHONPATH", "PYTHONSAFEPATH")  # a run with workers sets the latter


def test_a_module_that_hides_the_package_is_named(tmp_path: Path) -> None:
    hides, script = tmp_path / "simulator.py", tmp_path / "my.py"
    hides.write_text("class Sim: pass\n")
    script.write_text("import headway\nprint(len(headway.__all__))\n")
    alone = {key: one for key, one in os.environ.items() if key not in PATHS}
    told = f"{hides} hides Headway's package `simulator`: rename it, or start Python with -P"
    found = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, text=True, env=alone
    )
    assert found.stderr.splitlines()[-1] == f"ImportError: {told}"
    found = subprocess.run(
        [sys.executable, "-P", script], check=False, capture_output=True, text=True, env=alone
    )
    assert (found.returncode, found.stderr) == (0, "")
