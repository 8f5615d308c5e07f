"""The command `headway engines`: what each named engine models."""

from textwrap import fill
from typing import Annotated, Any

from headway.cli.options import Json, print_json, silent

WIDTH = 100  # columns


def engines(
    *,
    fields: Annotated[
        bool, silent("every field of their configurations, and what Headway does with it")
    ] = False,
    json_: Json = False,
) -> int:
    """List the engines that a scenario can name, with what is modelled and what not."""
    if fields:
        return _print_fields(json_=json_)
    rows = table()
    if json_:
        print_json(rows)
    else:
        print(_text(rows))
    return 0


def _print_fields(*, json_: bool) -> int:
    from simulator.launch.fields import fields

    if json_:
        print_json([row._asdict() for row in fields()])
        return 0
    said = {"none": "without effect", "told": "time not simulated", "refused": "refused"}
    for row in fields():
        effect = said.get(row.effect) or f"simulated by {row.effect}"
        note = f": {row.note}" if row.note else ""
        print(f"{row.engine} {row.config}.{row.field}: {effect}{note}")
    return 0


def table() -> list[dict[str, Any]]:
    """Return the engines with the keys that each sets for Llama-3-8B on an A100."""
    from simulator.build.engines import ENGINES
    from simulator.scenario.engine_defaults import with_defaults

    rows = []
    for name, engine in ENGINES.items():
        keys = with_defaults({"name": name}, None)
        assert isinstance(keys, dict)
        rows.append(
            {
                "engine": keys.pop("name"),
                "scheduler": keys.pop("scheduling_policy"),
                "follows": engine.follows,
                "modelled": engine.modelled,
                "not_modelled": engine.left_out,
                "sets": keys,
            }
        )
    return rows


def _text(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        lines.append(f"{row['engine']} (scheduling_policy: {row['scheduler']})")
        for key in ("follows", "modelled", "not_modelled"):
            label = f"  {key.replace('_', ' '):<13} "
            lines.append(
                fill(row[key], WIDTH, initial_indent=label, subsequent_indent=" " * len(label))
            )
    return "\n".join(lines)
