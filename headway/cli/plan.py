"""The verb `headway plan`: what is enough to keep service levels."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from headway.cli.console import print_interrupted_runs
from headway.cli.options import (
    DEFAULT_SETTINGS,
    DEPLOYMENT,
    Json,
    Quiet,
    ScenarioOrName,
    Settings,
    Slo,
    Vary,
    Workers,
    print_json,
    silent,
    whole,
)
from headway.cli.progress import search_progress
from simulator.util.errors import HeadwayError


def plan(  # more than 80 lines: 50 are its options
    scenario: ScenarioOrName,
    /,
    *,
    slo: Slo = None,
    vary: Vary = None,
    fewest: Annotated[
        str | None, silent("find the lowest value that keeps the levels, as cluster.replicas=1..8")
    ] = None,
    cheapest: Annotated[
        bool, silent("find the cheapest combination of --vary that keeps the levels")
    ] = False,
    buy: Annotated[bool, silent("choose the GPUs to buy, their number and settings")] = False,
    gpus: Annotated[
        str | None,
        silent(
            "with --buy: GPUs to choose from, with your price ($/h) or the list's, as "
            "H100=2.49,L40S "
            "[default: all with a price]"
        ),
    ] = None,
    precision: Annotated[
        str | None,
        silent("with --buy: dtype of the weights, as bf16 or fp8 [default: each that is profiled]"),
    ] = None,
    by_data_sheet: Annotated[
        bool, silent("with --buy: also GPUs without measured kernels, as MI300X")
    ] = False,
    objective: Annotated[
        Literal["cost", "energy"] | None,
        Parameter(help="the best candidate has the lowest cost or energy [default: cost]"),
    ] = None,
    settings: Settings = DEFAULT_SETTINGS,
    replications: Annotated[
        int | None,
        Parameter(help="runs of a load, if one run cannot decide it [default: 3]"),
        whole(),
    ] = None,
    tolerance: Annotated[
        float | None, Parameter(help="relative error allowed in the largest rate [default: 0.05]")
    ] = None,
    min_duration: Annotated[
        float | None, Parameter(help="least seconds of load in a run that decides [default: 600]")
    ] = None,
    max_duration: Annotated[
        float | None,
        Parameter(help="seconds in the longest run [default: 2400, or a longer --min-duration]"),
    ] = None,
    window: Annotated[
        float | None, silent("seconds of each stretch that must keep the levels; 3600: each hour")
    ] = None,
    optuna: Annotated[
        int | None, silent("how many combinations to try, chosen by Optuna [default: all]"), whole()
    ] = None,
    jobs: Workers = None,
    out: Annotated[
        Path | None,
        silent("folder for the files [default: out/NAME-plan; -plan-2 ... for other questions]"),
    ] = None,
    deploy: Annotated[
        Path | None, silent("folder for files that start the best's servers: Kubernetes, Helm")
    ] = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> int:
    """Find the largest request rate under service levels, the fewest replicas, the cheapest fleet.

    Keys of the scenario's block `plan` stand where options are not given; without any bound,
    99 % of the requests must keep the scenario's `goodput`. The same command goes on where an
    earlier one was stopped.
    """
    from headway.planning.buy_report import buying_problem, find_offers, wanted_gpus
    from headway.planning.journal import open_journal
    from headway.planning.plan import JOURNAL, Runs, find_best
    from headway.planning.plan_folder import choose_folder, question_key
    from headway.planning.plan_report import plan_table, write_plan
    from headway.planning.problem import PlanOptions, make_problem
    from simulator.scenario.load import load_scenario
    from simulator.simulation.write import check_folder
    from simulator.util.workers import use_backend

    options = PlanOptions(
        slo,
        vary,
        fewest=fewest,
        cheapest=cheapest,
        replications=replications,
        tolerance=tolerance,
        min_duration=min_duration,
        max_duration=max_duration,
        objective=objective,
        window=window,
    )
    find: Any  # all candidates, the best, and the answer in words where it is no table
    if buy:
        given = {"vary": vary, "fewest": fewest, "cheapest": cheapest, "optuna": optuna}
        if wrong := [name for name, value in given.items() if value]:
            raise HeadwayError(f"--{wrong[0]}: cannot be used with --buy, which varies what to buy")
        wanted = wanted_gpus(gpus, by_data_sheet=by_data_sheet)
        problem = buying_problem(scenario, options, (settings.overrides, settings.seed), wanted)
        find = partial(find_offers, problem, wanted, precision)
    elif gpus is not None or precision is not None or by_data_sheet:
        option = "precision" if precision else "by-data-sheet"
        raise HeadwayError(f"--{option if gpus is None else 'gpus'}: needs --buy")
    else:
        problem = make_problem(scenario, options, settings.overrides, settings.seed)
        find = partial(find_best, problem, optuna)
    question = question_key(problem, buy, gpus or by_data_sheet, precision, optuna)
    folder = check_folder(choose_folder(out, problem.name, question))
    if deploy is not None:
        check_folder(deploy, option="--deploy")
    rising = not problem.searches_rate
    try:
        with (
            open_journal(folder / JOURNAL) as journal,
            use_backend("loky", jobs),
            search_progress(quiet or json_, problem.key, rising=rising) as progress,
        ):
            candidates, best, told = find(Runs(jobs, progress, journal))
            journal.check()
            files = write_plan(problem, candidates, best, folder, told, question=question)
            if deploy is not None:
                files += import_module(DEPLOYMENT).write_deployment(
                    load_scenario(folder / "best.yaml"), deploy
                )
    except KeyboardInterrupt:
        return print_interrupted_runs(folder / JOURNAL)
    if json_:
        print_json(folder / "plan.json")
    elif not quiet:
        print("\n".join(told) or plan_table(problem, candidates, best))
        for where in (folder, *([deploy] if deploy is not None else [])):
            names = ", ".join(file.name for file in files if file.parent == where)
            print(f"written to {where}: {names}")
    return 0
