"""What the runs were given: their scenarios and cost profiles, as HTML."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from simulator.figures.data import Run
from simulator.views.html.tables import run_name, table


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
    """Show the cost models of the runs: what each was fitted to, how well, and from where.

    The groups of a cluster may have one each: then those that have it stand beside its name.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for k, run in enumerate(runs):
        for group, name, cost in _costs(run):
            where = ([run_name(run, k)] if len(runs) > 1 else []) + ([group] if group else [])
            found.setdefault((name, _cost(cost, name)), []).append(": ".join(where))
    parts = []
    for (name, text), users in found.items():
        texts = f" <small>{', '.join(users)}</small>" if len(found) > 1 else ""
        parts.append(f"<h3>{escape(name)}{texts}</h3>{text}")
    return "".join(parts)


def _cost(cost: object, name: str) -> str:
    text = _profile_text(cost, name)
    if text is None:
        return f"<p>{escape(_pairs(cost))}</p>"
    return f"{_fit(text)}<details><summary>Profile</summary><pre>{escape(text)}</pre></details>"


def _costs(run: Run) -> Iterable[tuple[str, str, object]]:
    """Give the group, the name of its cost model and its `cost`; of all replicas without groups."""
    whole = run.scenario.get("cost")
    cluster = run.scenario.get("cluster")
    kinds = cluster.get("groups") if isinstance(cluster, Mapping) else None
    if not isinstance(kinds, Mapping) or not run.groups:
        yield "", str(run.summary["headway"].get("profile")), whole
        return
    for name, group in run.groups.items():
        kind = kinds.get(name)
        kind = kind if isinstance(kind, Mapping) else {}
        cost = kind.get("cost") or (None if kind.get("gpu") else whole)
        yield escape(name) if kinds else "", str(group.get("profile")), cost


def _profile_text(cost: object, name: str) -> str | None:
    """Read the profile that a scenario names, or had for want of one, where it can be found."""
    from simulator.costs.profile import find_profile, shipped_profiles

    named = cost.get("profile") if isinstance(cost, Mapping) else None
    if cost is None and name in shipped_profiles():
        named = name
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
    texts = [f"{key} {_value_text(inner)}".strip() for key, inner in pairs if inner is not None]
    return ", ".join(texts).replace("_", " ")


def _value_text(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(f"{one:,}" if isinstance(one, int) else str(one) for one in value)
    return str(value)
