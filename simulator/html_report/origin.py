"""What the runs were given: their scenarios and cost profiles, as HTML."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from simulator.html_report.runs import Run
from simulator.html_report.tables import run_name, table


def scenarios(runs: Sequence[Run]) -> str:
    """Show in what the scenarios differ, and each of them."""
    import yaml

    parts = []
    if len(runs) > 1:
        flat = [dict(_flat(run.scenario)) for run in runs]
        keys = dict.fromkeys(key for one in flat for key in one)
        rows = [
            [escape(key), *(escape(str(one.get(key, ""))) for one in flat)]
            for key in keys
            if len({str(one.get(key, "")) for one in flat}) > 1
        ]
        names = [run_name(run, k) for k, run in enumerate(runs)]
        parts.append(table(["differs in", *names], rows) if rows else "<p>All the same.</p>")
    for k, run in enumerate(runs):
        text = yaml.safe_dump(run.scenario, sort_keys=False, allow_unicode=True)
        name = f" of {run_name(run, k)}" if len(runs) > 1 else ""
        parts.append(
            f"<details><summary>Scenario{name}</summary><pre>{escape(text)}</pre></details>"
        )
    return "".join(parts)


def _flat(values: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def profiles(runs: Sequence[Run]) -> str:
    """Show the cost model of the runs: what it was fitted to, how well, and from where."""
    parts = []
    for name in dict.fromkeys(str(run.summary["headway"].get("profile")) for run in runs):
        cost = next(
            run.scenario.get("cost")
            for run in runs
            if str(run.summary["headway"].get("profile")) == name
        )
        text = _profile_text(cost)
        if text is None:
            given = escape(_pairs(cost))
            parts.append(f"<h3>{escape(name)}</h3><p>{given}</p>")
            continue
        parts.append(f"<h3>{escape(name)}</h3>{_fit(text)}")
        parts.append(f"<details><summary>Profile</summary><pre>{escape(text)}</pre></details>")
    return "".join(parts)


def _profile_text(cost: object) -> str | None:
    """Read the profile that a scenario names, where it can still be found."""
    from simulator.profile import find_profile

    named = cost.get("profile") if isinstance(cost, Mapping) else None
    try:
        return find_profile(str(named)).read_text("utf-8") if named else None
    except (OSError, ValueError):
        return None


def _fit(text: str) -> str:
    """Make a table of a profile's hardware, range and relative errors."""
    import yaml

    raw = yaml.safe_load(text)
    rows = []
    for key in ("model", "hardware", "engine", "overhead", "range", "fit"):
        value = raw.get(key)
        if value is not None:
            rows.append([key, escape(_pairs(value))])
    sources = [
        ", ".join(str(one[key]) for key in ("repository", "commit", "licence") if key in one)
        for one in raw.get("sources") or []
        if isinstance(one, Mapping)
    ]
    rows += [["source", escape(source)] for source in sources]
    return table(["", ""], rows, "words")


def _pairs(value: object) -> str:
    """Write keys with their values, one after the other."""
    pairs = list(_flat(value)) if isinstance(value, Mapping) else [("", value)]
    told = [f"{key} {_told(inner)}".strip() for key, inner in pairs if inner is not None]
    return ", ".join(told).replace("_", " ")


def _told(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(f"{one:,}" if isinstance(one, int) else str(one) for one in value)
    return str(value)
