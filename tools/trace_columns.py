"""The table and list of docs/workloads.md that say what becomes of columns, made from the readers.

`python -m tools.trace_columns` puts them into the page.
"""

from collections.abc import Iterator
from pathlib import Path

from simulator.workload.traces.fields import FIELDS, TELLABLE
from simulator.workload.traces.formats import FORMATS

PAGE = Path(__file__).parents[1] / "docs" / "workloads.md"
BEGIN = "<!-- made by `python -m tools.trace_columns` -->\n"
END = "<!-- end -->\n"
OTHERS = "the well-known names below"


def tables() -> str:
    """Make the tables: of each format its own names, and the names that people give most."""
    rows = [*_formats(), "", *_fields()]
    return BEGIN + "\n".join(rows) + "\n" + END


def page(text: str) -> str:
    """Put the tables into the text of the page."""
    before, _, rest = text.partition(BEGIN)
    return before + tables() + rest.partition(END)[2]


def _formats() -> Iterator[str]:
    yield "| format | columns or keys used |"
    yield "|---|---|"
    for form in FORMATS.values():
        fields: dict[str, list[str]] = {}
        for name, field in form.used.items():
            fields.setdefault(field, []).append(f"`{name}`")
        used = "; ".join(f"{field}: {', '.join(names)}" for field, names in fields.items())
        yield f"| `{form.name}` | {used or OTHERS} |"


def _fields() -> Iterator[str]:
    yield "The well-known names of the fields that people name most"
    yield "(`simulator/workload/traces/names.yaml` has all fields):"
    yield ""
    for field in TELLABLE.strip().split(", "):
        yield f"- `{field}`: {', '.join(f'`{name}`' for name in FIELDS[field])}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
