"""The page of a film: batching step by step, side by side, to play and to step through."""

from collections.abc import Sequence
from html import escape

from simulator.figures.film import Film, as_json
from simulator.views.html.page import frame, read_asset

LEGEND = (
    ("prefill", "prefill: a chunk of a prompt"),
    ("decode", "decode: a token"),
    ("kept", "done, keeps its seat"),
)


def film_page(films: Sequence[Film]) -> str:
    """Return the whole page, which needs no network."""
    name = "Watch it batch: " + ", ".join(film.label for film in films)
    head = f"<header><button type=button id=theme>Theme</button><h1>{escape(name)}</h1></header>"
    script = f"mountPlayer(document.getElementById('player'), {as_json(films)});"
    keys = "".join(
        f'<span><i style="background:var(--{hue})"></i>{text}</span>' for hue, text in LEGEND
    )
    legend = (
        "<p class=note>A row is a seat of the batch. All runs are shown at the same moment; a step "
        f"is one pass through the model.</p><div class=keys>{keys}</div>"
    )
    return frame(
        name,
        f"{head}<main>{legend}<div id=player class=player></div></main>",
        f'<script>{read_asset("player.js")}</script><script>"use strict";{script}</script>',
    )
