"""The verb `headway studio`: a page on which a scenario's knobs are turned."""

from pathlib import Path
from typing import Annotated

from headway.cli.options import Port, ScenarioOrName, SetKeys, silent


def studio(
    scenario: ScenarioOrName = Path("demo"),
    /,
    *,
    port: Port = 8765,
    open_: Annotated[bool, silent("open the page in a browser", "--open")] = False,
    set_: SetKeys = None,
) -> int:
    """Change a scenario on a local page, and see the results at once; until Ctrl-C."""
    from headway.studio.server import studio as serve
    from simulator.scenario.load import find_scenario

    find_scenario(scenario)

    def ready(address: str) -> None:
        print(f"the studio is at {address}; Ctrl-C ends it", flush=True)
        if open_:
            import webbrowser

            webbrowser.open(address)

    serve(str(scenario), set_ or [], port, ready)
    return 0
