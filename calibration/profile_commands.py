"""headway profile: list the shipped cost profiles, show one; show the other coefficients."""

from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from typing import Annotated, Any

from cyclopts import App, Parameter

from headway.cli.options import Json, print_json
from simulator.util.errors import HeadwayError

COEFFICIENTS = "coefficients"
app = App(name="profile", help="List the cost profiles, or show one.")


@app.command(name="list")
def list_(*, json_: Json = False) -> int:
    """List the profiles that come with the package, with their fit errors, and all models."""
    from simulator.costs.profile import PROFILES, named_hardware, shipped_profiles
    from simulator.models.load import shipped_models
    from simulator.util.yaml_lines import parse, read_text

    rows = []
    for name in shipped_profiles():
        path = PROFILES / f"{name}.yaml"
        raw, _ = parse(read_text(path), str(path))
        fit = raw["fit"] if isinstance(raw, dict) else {}
        errors = {key: fit[key] for key in ("median_relative_error", "p95_relative_error")}
        scaled = isinstance(raw, dict) and "fallback" in raw
        rows.append({"profile": name, **named_hardware(name), **errors, "scaled": scaled})
    if json_:
        print_json(rows)
        return 0
    head = f"{'profile':<40}{'GPU':<14}{'TP':>3}  {'weights':<10}{'cache':<10}"
    print(f"{head}{'median':>8}{'P95':>8}")
    for row in rows:
        name, gpu, tp, weights, cache, median, p95, scaled = row.values()
        found = f"{median:>8.1%}{p95:>8.1%}{' *' if scaled else ''}"
        print(f"{name:<40}{gpu:<14}{tp:>3}  {weights:<10}{cache:<10}{found}")
    print("median, P95: errors of the step times fitted; TP: GPUs that share each layer")
    print("* in part by roofline, scaled to measured kernels: see `fallback` in the profile")
    print(f"models: {', '.join(shipped_models())}")
    return 0


@app.command
def show(
    name: Annotated[
        str, Parameter(name="NAME", help=f"shipped profile, or a path; or {COEFFICIENTS}")
    ],
    /,
    *,
    json_: Json = False,
) -> int:
    """Print a profile's terms, range, errors and sources, or all other coefficients."""
    from simulator.costs.profile import find_profile, read_profile
    from simulator.util.yaml_lines import parse

    if name == COEFFICIENTS:
        rows = list(coefficients())
        if json_:
            print_json(rows)
        for row in () if json_ else rows:
            print(f"{row['name']}: {row['value']} {row['unit']}")
            by = "".join(
                f"; {key}: {row[key]}" for key in ("script", "width", "judge") if key in row
            )
            print(f"    {row['method']}: {row['source']}{by}")
        return 0
    try:
        path = find_profile(name)
    except ValueError as error:
        raise HeadwayError(str(error)) from None
    read_profile(path)  # tells what is wrong with it
    text = path.read_text("utf-8")
    if json_:
        print_json(parse(text, str(path))[0])
    else:
        print(text, end="")
    return 0


def coefficients() -> Iterator[dict[str, Any]]:
    """Yield every coefficient that no kernel table has: its value, and how that is known."""
    from simulator.costs.roofline import EFFICIENCIES, measured_efficiencies
    from simulator.util.yaml_lines import parse, read_text

    path = EFFICIENCIES.with_name("coefficients.yaml")
    rows, _ = parse(read_text(path), str(path))
    assert isinstance(rows, list)
    for row in rows:
        place, name, value = row.pop("of"), row["name"], row.get("value")
        if place == EFFICIENCIES.name:
            value = {gpu: getattr(one, name) for gpu, one in measured_efficiencies().items()}
        elif value is None:
            value = reduce(_part, name.split("."), import_module(place))
        yield {"name": name, "value": value, **row}


def _part(whole: Any, name: str) -> Any:
    """Return what has a name in a module, a mapping or an object."""
    return whole[name] if isinstance(whole, dict) else getattr(whole, name)
