"""headway profile: list the shipped cost profiles, show one."""

from typing import Annotated

from cyclopts import App, Parameter

from headway.cli.options import Json, print_json
from simulator.util.errors import HeadwayError

app = App(name="profile", help="List the cost profiles here, and show one.")


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
    print("* in part by roofline, scaled to measured kernels: see `fallback` in the profile")
    print(f"models: {', '.join(shipped_models())}")
    return 0


@app.command
def show(
    name: Annotated[str, Parameter(name="NAME", help="shipped profile, or a path")],
    /,
    *,
    json_: Json = False,
) -> int:
    """Print a profile: its terms, range, errors and sources."""
    from simulator.costs.profile import find_profile, read_profile
    from simulator.util.yaml_lines import parse

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
