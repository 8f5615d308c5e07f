"""Scenarios that come with Headway, by name."""

from pathlib import Path

from simulator.util.errors import HeadwayError, meant

PACKAGE = Path(__file__).parent.parent
FOLDERS = (PACKAGE / "scenarios", PACKAGE.parent / "scenarios")
"""In an installed package, and in a checkout."""


def find_scenario(path: Path) -> Path:
    """Give a scenario's file: the path itself, or what is shipped under a name without an ending.

    `demo` and `examples/load` are names. A file or folder of that name goes first. Raises
    HeadwayError, with the names there are, where there is neither.
    """
    if path.exists() or path.suffix or path.is_absolute():
        return path
    for folder in FOLDERS:
        if (found := folder / f"{path}.yaml").is_file():
            return found
    names = shipped_scenarios()
    raise HeadwayError(
        f"{path}: no such file, and not one of the shipped scenarios: {', '.join(names)}"
        f"{meant(str(path), names)}"
    )


def shipped_scenarios() -> list[str]:
    """List the names."""
    for folder in FOLDERS:
        if found := sorted(folder.glob("**/*.yaml")):
            return [file.relative_to(folder).with_suffix("").as_posix() for file in found]
    return []
