"""The verb `headway doctor`: is this installation whole?"""

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from headway.cli.options import Json, print_json

EXTRAS = ("gpu", "parquet", "dask", "ray", "optuna", "serve", "kv-events")
"""The extras that users install; the others are for those who change Headway."""


def doctor(*, json_: Json = False) -> int:
    """Check versions, extras and data, and simulate a few requests; 1 where something is wrong."""
    found = examine()
    if json_:
        print_json(found)
    else:
        print(_text(found))
    return int(bool(found["problems"]))


def examine() -> dict[str, Any]:
    """Return what there is of the installation, and what is wrong with it."""
    from simulator.util.environment import source_commit
    from simulator.util.version import __version__

    required, extras, problems = _requirements()
    run, trouble = _try_run()
    data = os.environ.get("HEADWAY_DATA")
    if data is not None and not Path(data).is_dir():
        problems.append(f"HEADWAY_DATA {data}: no such folder")
    return {
        "headway": __version__,
        "commit": source_commit(),
        "folder": str(Path(__file__).parents[2]),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "required": required,
        "extras": extras,
        "data": data,
        "run": run,
        "problems": problems + trouble,
    }


def _requirements() -> tuple[dict[str, str | None], dict[str, dict[str, str | None]], list[str]]:
    """Return the versions that are installed, of what is required and of the extras; and faults."""
    from packaging.requirements import Requirement

    required: dict[str, str | None] = {}
    extras: dict[str, dict[str, str | None]] = {extra: {} for extra in EXTRAS}
    problems = []
    try:
        texts = metadata.requires("headway") or []
    except metadata.PackageNotFoundError:
        return required, extras, ["headway is not installed: pip install . in a checkout"]
    for wanted in map(Requirement, texts):
        if wanted.name == "headway":
            continue
        places = [
            name for name in EXTRAS if wanted.marker and wanted.marker.evaluate({"extra": name})
        ]
        if wanted.marker and not places:
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            version = None
        for place in [extras[name] for name in places] or [required]:
            place[wanted.name] = version
        if version is None and not places:
            problems.append(f"{wanted.name} is missing: pip install '{wanted}'")
        elif version is not None and not wanted.specifier.contains(version, prereleases=True):
            problems.append(
                f"{wanted.name} is {version}: pip install '{wanted.name}{wanted.specifier}'"
            )
    return required, extras, problems


def _try_run() -> tuple[dict[str, Any], list[str]]:
    """Simulate the first requests of the demo; return figures, and what went wrong."""
    from simulator import load_scenario, run
    from simulator.scenario.load import FOLDERS, shipped_scenarios

    count = 20
    try:
        (demo, *_) = (file for folder in FOLDERS if (file := folder / "demo.yaml").exists())
        summary = run(load_scenario(demo, [f"workload.num_prompts={count}"])).summary()
    except (ImportError, OSError, ValueError) as error:
        return {}, [f"a run of the demo fails: {error}"]
    problems = []
    if summary["completed"] != count:
        problems.append(f"a run of the demo served {summary['completed']} of {count} requests")
    figures = {"requests": summary["completed"], "mean_ttft_ms": summary["mean_ttft_ms"]}
    return {**figures, "shipped_scenarios": len(shipped_scenarios())}, problems


def _text(found: dict[str, Any]) -> str:
    rows = [
        ("headway", f"{found['headway']} ({found['commit']}) in {found['folder']}"),
        ("python", f"{found['python']}, {found['executable']}"),
        ("platform", found["platform"]),
        ("requires", ", ".join(f"{name} {version}" for name, version in found["required"].items())),
    ]
    for extra, packages in found["extras"].items():
        there = [f"{name} {version}" for name, version in packages.items() if version]
        whole = len(there) == len(packages)
        rows.append(
            (f"[{extra}]", ", ".join(there) if whole else f"pip install 'headway[{extra}]'")
        )
    rows.append(("data", found["data"] or "HEADWAY_DATA is not set; only some tests need it"))
    if found["run"]:
        run = found["run"]
        rows.append(("demo", f"{run['requests']} requests, mean TTFT {run['mean_ttft_ms']:.1f} ms"))
    lines = [f"{name:<12}{text}" for name, text in rows]
    return "\n".join(lines + (found["problems"] or ["no problem found"]))
