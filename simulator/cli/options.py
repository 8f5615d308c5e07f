"""Options of `headway run` for what is large: workers, and no tables."""

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from simulator.util.errors import HeadwayError

Jobs = Annotated[
    int | None,
    Parameter(help="run a cluster's replicas on so many workers; its router must look at none"),
]
Backend = Annotated[Literal["loky", "dask", "ray"] | None, Parameter(help="who runs these workers")]
NoTables = Annotated[
    bool,
    Parameter(
        name="--no-tables",
        negative="",
        show_default=False,
        help="summary.json alone, in memory that does not grow with the requests",
    ),
]
Address = Annotated[
    str | None, Parameter(help="of a Dask scheduler or Ray cluster, host:port", show_default=False)
]


def workers_asked_for(jobs: int | None, backend: str | None, address: str | None) -> dict[str, Any]:
    """Give what `use_backend` needs; nothing where no workers are asked for."""
    if jobs is not None and jobs < 1:
        raise HeadwayError(f"--jobs {jobs}: must be at least 1")
    if jobs is None and backend is None and address is None:
        return {}
    return {"name": backend or "loky", "jobs": jobs, "address": address}
