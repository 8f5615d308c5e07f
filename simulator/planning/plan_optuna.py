"""Which combinations a plan tries, chosen by Optuna in place of all of them."""

from collections.abc import Callable, Sequence

from simulator.planning.plan import Candidate, Question, answer, load_candidate
from simulator.util.errors import HeadwayError

BATCH = 4  # candidates that Optuna names at a time


def answer_by_optuna(
    question: Question,
    axes: Sequence[tuple[str, Sequence[str]]],
    trials: int,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Candidate]:
    """Search among the combinations by Optuna's TPE; return those it tried, answered.

    The batches are of one size whatever `jobs` says, so the same seed tries the same ones.
    """
    try:
        import optuna
    except ImportError:
        raise HeadwayError("--optuna: needs optuna; pip install headway[optuna]") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=question.seed % 2**32, constant_liar=True),
    )
    tried: dict[tuple[str, ...], Candidate] = {}
    for begin in range(0, trials, BATCH):
        asked = [study.ask() for _ in range(min(BATCH, trials - begin))]
        chosen = [
            tuple(trial.suggest_categorical(key, list(values)) for key, values in axes)
            for trial in asked
        ]
        fresh: dict[tuple[str, ...], Candidate] = {}
        for values in chosen:
            if values not in tried:
                varied = {key: value for (key, _), value in zip(axes, values, strict=True)}
                tried[values] = fresh[values] = load_candidate(
                    question.path, question.overrides, question.seed, varied
                )
        answer(question, list(fresh.values()), jobs, progress)
        for trial, values in zip(asked, chosen, strict=True):
            study.tell(trial, worth(tried[values], question))
    return list(tried.values())


def worth(candidate: Candidate, question: Question) -> float:
    """Rate a candidate for Optuna: more is better, and less than nothing where it does not hold."""
    if candidate.answer.best is None:
        misses = [trial.miss(question.rules.slos) for trial in candidate.answer.trials]
        return -1e6 - min(misses, default=1e6)
    weight = candidate.dollars_per_hour or float(candidate.gpus)
    if question.high or not question.key:
        return -weight
    return candidate.read("request_throughput").mean / weight
