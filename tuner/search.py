"""The search over candidates: a loop of choose, evaluate and tell.

Three objectives are to be made small, cost, loss and memory, within constraints.  The log of
trials is the truth, and every choice is a function of (seed, finished trials): resumed or not, the
same walk.  A candidate is never evaluated twice, and the search stops when the space is spent.

Ours, `tpe`, begins with the exact program's schedules and their neighbours, then lets
`tuner.guide` and Optuna's tree-structured Parzen estimator take turns.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial

import optuna
from optuna.trial import TrialState

from tuner.guide import guided
from tuner.space import Candidate, Knob, first_candidates, offers
from tuner.strategies import STRATEGIES, drawn, proposed
from tuner.study import (
    Study,
    as_trial,
    beating,
    claimed,
    created,
    distributions,
    hand_in,
    publish,
    reached,
    values_of,
)
from tuner.trials import TrialLog, TrialResult

# Seconds between two looks at what others do, when nothing is left but what they run.
_WAIT_S = 1.0

# Of the trials after the first ones, one in so many is Optuna's own.
_TURN = 4

Evaluate = Callable[[Candidate, int, Sequence[TrialResult]], TrialResult]


def search(
    space: Sequence[Knob],
    evaluate: Evaluate,
    log: TrialLog,
    study: Study,
    trials: int,
    seed: int,
    strategy: str = "tpe",
    deadline: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[TrialResult]:
    """Return all finished trials, those found in the log and other workers' included.

    Args:
        space: The knobs.
        evaluate: (candidate, trial number, finished trials) to its result.
        log: Where this folder's finished trials are.
        study: Told of every finished trial once.
        trials: Finished trials to reach, of all workers together.
        seed: Of the walk.
        strategy: One of STRATEGIES.
        deadline: Time of `clock` after which no trial starts; the first one always runs.
        clock: Seconds.

    Raises:
        CadenzaError: The storage went away; what is finished is in the log.
        ValueError: Unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is one of {', '.join(STRATEGIES)}, got {strategy!r}")
    written = log.read()
    mine, following = study.competing(written), max((e.number for e in written), default=-1) + 1
    with reached():
        publish(study, space, mine)
        told: set[tuple[int, Candidate]] = set()
        while True:
            finished = sorted((*mine, *study.elsewhere()), key=lambda result: result.number)
            for result in finished:
                if (result.number, result.candidate) not in told:
                    told.add((result.number, result.candidate))
                    if offers(space, result.candidate):
                        study.own.add_trial(as_trial(space, result))
            if len({result.candidate for result in finished}) >= trials:
                return finished
            if deadline is not None and finished and clock() >= deadline:
                return finished
            found = claimed(
                space, study, finished, partial(_next, space, study, finished, seed, strategy)
            )
            if found is None:
                if not study.trials(TrialState.RUNNING):
                    return finished
                time.sleep(_WAIT_S)  # what others run may be left for us
                continue
            candidate, claim = found
            with beating(study, claim):
                # A log that another device began has numbers of its own: they only ascend.
                number = following if claim is None else max(following, claim.number)
                result = evaluate(candidate, number, finished)
                following = number + 1
            log.append(result)
            mine.append(result)
            if claim is not None and study.shared is not None:
                hand_in(study, claim, result)


def importance(
    space: Sequence[Knob], results: Sequence[TrialResult]
) -> dict[str, dict[str, float]]:
    """Return how much of each objective's variance each knob explains, by objective; 0 to 1.

    By Optuna's PED-ANOVA.  {} where it cannot be told: too few trials, or all alike.

    Args:
        space: The knobs.
        results: Finished trials; those that failed or that the space does not offer are left out.
    """
    known = [each for each in results if each.failed is None and offers(space, each.candidate)]
    if len(known) < 4:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = created(optuna.storages.InMemoryStorage(), "importance")
    for result in known:
        study.add_trial(as_trial(space, result))
    found: dict[str, dict[str, float]] = {}
    for index, objective in enumerate(("cost", "loss", "memory")):
        values = [values_of(result)[index] for result in known]
        if max(values) - min(values) <= 1e-12 * max(1.0, abs(max(values))):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # That it tells what makes a value low is just what is wanted.
            warnings.filterwarnings("ignore", "PedAnovaImportanceEvaluator", UserWarning)
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            try:
                shares = optuna.importance.get_param_importances(
                    study,
                    evaluator=evaluator,
                    params=[knob.name for knob in space if len(knob.choices) > 1],
                    target=partial(_objective, index),
                )
            except (ValueError, RuntimeError):
                continue  # too few trials, or all alike
        found[objective] = {name: float(share) for name, share in shares.items()}
    return found


def _next(
    space: Sequence[Knob],
    study: Study,
    finished: Sequence[TrialResult],
    run_seed: int,
    strategy: str,
    taken: Collection[Candidate],
) -> Candidate | None:
    """Return the candidate that a strategy tries next, or None when it is through."""
    seed = _seed(run_seed, len(finished))
    if strategy != "tpe":
        return proposed(strategy, space, finished, taken, seed)
    first = next((each for each in first_candidates(space) if each not in taken), None)
    if first is not None:
        return first
    known = [result for result in finished if offers(space, result.candidate)]
    if len(finished) % _TURN:
        found = guided(space, known, taken, seed)
        if found is not None:
            return found
    if drawn(space, taken, seed) is None:
        return None
    asked = _asked(space, study, seed)
    if asked not in taken:
        return asked
    # The sampler repeats itself in small spaces: take one that is close to what it wanted.
    near = [
        asked.changed(**{knob.name: choice})
        for knob in space
        for choice in knob.choices
        if choice != asked[knob.name]
    ]
    free = [each for each in near if each not in taken]
    return free[seed % len(free)] if free else drawn(space, taken, seed)


def _asked(space: Sequence[Knob], study: Study, seed: int) -> Candidate:
    """Return what Optuna's multi-objective TPE would try."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.own.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=3)
    trial = study.own.ask(distributions(space))
    # What is evaluated goes to the study as a trial of its own, so this question is closed.
    study.own.tell(trial, state=TrialState.FAIL)
    return Candidate(tuple((knob.name, trial.params[knob.name]) for knob in space))


def _seed(seed: int, count: int) -> int:
    """Return the seed of one choice: another for each number of finished trials."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{count}".encode()).digest()[:4], "big")


def _objective(index: int, trial: optuna.trial.FrozenTrial) -> float:
    return float(trial.values[index])
