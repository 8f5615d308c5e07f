"""The verb `headway explain`: one request's story."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.options import whole


def explain(
    folder: Annotated[Path, Parameter(name="OUT_DIR", help="folder that `headway run` wrote")],
    request: Annotated[
        int, Parameter(name="REQUEST_ID", help="id in requests.csv, from 0"), whole(0)
    ],
    /,
) -> int:
    """Explain where one request's time went, and why."""
    from headway.runs.explain import explain as tell

    print(tell(folder, request))
    return 0
