"""The verb `headway rollouts`: the generation phase of reinforcement learning, step by step."""

from typing import Any

from headway.cli.options import DEFAULT_SETTINGS, Json, ScenarioOrName, Settings, print_json

LONG = 0.3  # share of a step: a longer tail is told


def rollouts(
    scenario: ScenarioOrName, /, *, settings: Settings = DEFAULT_SETTINGS, json_: Json = False
) -> int:
    """Simulate steps of rollouts: groups of samples, of which the slowest ends the step."""
    from headway.planning.rollouts import rollouts as steps_of
    from simulator.scenario.load import load_scenario

    overrides = [*settings.overrides]
    if settings.seed is not None:
        overrides.append(f"seed={settings.seed}")
    loaded = load_scenario(scenario, overrides)
    steps = [step._asdict() for step in steps_of(loaded)]
    total = totals(steps, loaded.rollouts.train_time)
    if json_:
        print_json({"steps": steps, "total": total})
        return 0
    print(f"{'step':>4}{'s':>10}{'tail, s':>10}{'tokens/s':>12}{'wasted':>9}{'stale':>9}")
    for at, step in enumerate(steps):
        whole = step["tokens"] or 1
        shares = step["wasted"] / whole, step["stale"] / whole
        rate = step["tokens"] / step["seconds"]
        head = f"{at:>4}{step['seconds']:>10.2f}{step['tail']:>10.2f}{rate:>12,.0f}"
        print(head + "".join(f"{share:>9.1%}" for share in shares))
    for name, value in total.items():
        print(f"{name.replace('_', ' ')}: {'unknown' if value is None else f'{value:,.4g}'}")
    if total["tail_share"] > LONG and not loaded.rollouts.oversampling:
        print(
            f"In {total['tail_share']:.0%} of the time less than a tenth of the samples is left.\n"
            "Knob: raise rollouts.oversampling from 0 to 0.25, and set rollouts.partial to true."
        )
    return 0


def totals(steps: list[dict[str, Any]], train_time: float) -> dict[str, Any]:
    """Put steps together; the training between them is paid for, too."""
    generating = sum(step["seconds"] for step in steps)
    samples = sum(step["samples"] for step in steps)
    seconds = generating + train_time * len(steps)
    hourly = steps[0]["dollars_per_hour"]
    return {
        "seconds_per_step": seconds / len(steps),
        "samples_per_second": samples / seconds,
        "tail_share": sum(step["tail"] for step in steps) / generating,
        "wasted_share": sum(step["wasted"] for step in steps)
        / sum(step["tokens"] for step in steps),
        "dollars_per_1000_samples": (
            None if hourly is None else hourly / 3600 * seconds / samples * 1000
        ),
    }
