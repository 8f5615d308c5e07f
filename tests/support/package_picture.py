"""The picture of the packages, drawn from the import contracts and each package's first sentence.

`python -m tests.support.package_picture > docs/images/packages.svg` draws it.
"""

import textwrap
from html import escape
from pathlib import Path

from tests.support.file_index import ROOT, layers, summary

WIDTH, MARGIN, GAP, LEFT = 960, 16, 8, 34  # px; the arrow stands left of LEFT
LINE, PADDING, LETTER = 16, 7, 6.0  # px: of a line of text, around it, the mean width of a letter


def box(name: str, x: float, y: float, width: float, height: float, color: str) -> list[str]:
    """Draw one package: its name, and what lives there."""
    text = sentences(name, width)
    lines = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" '
        f'fill="{color}" stroke="#8795a8"/>'
    ]
    for number, words in enumerate(text):
        bold = f'<tspan font-weight="bold">{escape(Path(name).name)}</tspan> '
        at = y + PADDING + (number + 0.75) * LINE
        shown = escape(words)
        if number == 0:
            shown = bold + escape(words.partition(" ")[2])
        lines.append(f'<text x="{x + PADDING:.1f}" y="{at:.1f}">{shown}</text>')
    return lines


def sentences(name: str, width: float) -> list[str]:
    """Wrap a package's name and first sentence to a box of this width."""
    text = f"{Path(name).name} {summary(ROOT / name / '__init__.py').split('. ')[0]}"
    return textwrap.wrap(text.rstrip(".").replace("`", ""), int((width - 2 * PADDING) / LETTER))


def rows(places: list[list[str]], y: float, color: str) -> tuple[list[str], float]:
    """Draw rows of packages from the top down; return the lines, and where the last row ends."""
    lines = []
    for names in places:
        width = (WIDTH - LEFT - MARGIN - GAP * (len(names) - 1)) / len(names)
        height = 2 * PADDING + LINE * max(len(sentences(name, width)) for name in names)
        for number, name in enumerate(names):
            lines += box(name, LEFT + number * (width + GAP), y, width, height, color)
        y += height + GAP
    return lines, y


def picture() -> str:
    """Return the SVG."""
    inside, above = layers()
    upper, y = rows(above, 44, "#fdf3dc")
    floor = y + 24
    lower, end = rows(
        [[f"simulator/{name}" for name in row] for row in inside], floor + 8, "#e5eefa"
    )
    arrow = f"M 17 {44} V {end - 18} m -5 -9 l 5 9 l 5 -9"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end + 4:.0f}" '
        f'font-family="sans-serif" font-size="12.5" fill="#1b2430">',
        f'<rect width="{WIDTH}" height="{end + 4:.0f}" fill="#ffffff"/>',
        '<text x="34" y="28" font-size="14">The packages. One may import those below it, never one '
        "above or beside it.</text>",
        f'<path d="{arrow}" fill="none" stroke="#8795a8" stroke-width="2"/>',
        f'<text x="34" y="{floor - 4:.1f}" font-size="14" font-weight="bold">simulator/</text>',
    ]
    return "\n".join([*head, *upper, *lower, "</svg>", ""])


if __name__ == "__main__":
    print(picture(), end="")
