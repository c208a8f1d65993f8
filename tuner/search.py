"""The search over candidates; the only file that knows Optuna.

An ask-and-tell loop with two objectives, cost and loss, and constraints.  Finished trials of the
log are told first, so a killed search goes on where it was.  The sampler is seeded anew for each
trial from (seed, number of finished trials): resumed or not, the same walk.  A candidate is never
evaluated twice, and the search stops when the space is spent.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import SQLAlchemyError

from engines.errors import InputError
from tuner.space import Candidate, Knob, first_candidates
from tuner.trials import TrialLog, TrialResult

STRATEGIES = ("tpe", "random")

# What a failed candidate is told to the sampler as, so that it keeps away from its like.
FAILED_COST = 1e12


def open_study(folder: Path, storage: str | None, name: str = "cadenza") -> optuna.Study:
    """Return the study of a tune folder.

    Without a storage it is made anew beside the log, which is the truth; `search` fills it.

    Args:
        folder: Where the study's journal lies when no storage is given.
        storage: URL of a database that Optuna knows, or None.
        name: Of the study; a database holds those of many commands.

    Raises:
        InputError: The database cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    where: optuna.storages.BaseStorage | str
    if storage is None:
        file = folder / "study.journal"
        file.unlink(missing_ok=True)
        journal = JournalFileBackend(str(file))
        where = optuna.storages.JournalStorage(journal)
    else:
        where = storage
    try:
        return optuna.create_study(
            study_name=name,
            storage=where,
            directions=["minimize", "minimize"],
            load_if_exists=True,
        )
    except (SQLAlchemyError, ImportError, ValueError) as error:
        if storage is None:
            raise
        why = str(error).partition("\n")[0].rstrip(".")
        raise InputError(
            f"the storage {storage!r} cannot be used: {why}; give the URL of a database, for "
            f"instance sqlite:///study.db, and install what it needs"
        ) from error


def search(
    space: Sequence[Knob],
    evaluate: Callable[[Candidate, int], TrialResult],
    log: TrialLog,
    study: optuna.Study,
    trials: int,
    seed: int,
    strategy: str = "tpe",
    deadline: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[TrialResult]:
    """Return all finished trials of the folder, the ones found in the log included.

    Args:
        space: The knobs.
        evaluate: (candidate, trial number) to its result.
        log: Where finished trials are.
        study: Told of every finished trial once.
        trials: Finished trials to reach.
        seed: Of the walk.
        strategy: "tpe" or "random".
        deadline: Time of `clock` after which no trial starts; the first one always runs.
        clock: Seconds.

    Raises:
        ValueError: Unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is one of {', '.join(STRATEGIES)}, got {strategy!r}")
    finished = log.read()
    told = {trial.user_attrs.get("number") for trial in study.get_trials(deepcopy=False)}
    for result in finished:
        if result.number not in told and _inside(space, result.candidate):
            study.add_trial(_as_trial(space, result))
    done = {result.candidate for result in finished}
    while len(finished) < trials:
        if deadline is not None and finished and clock() >= deadline:
            break
        candidate = _next_candidate(space, study, done, seed, len(finished), strategy)
        if candidate is None:
            break
        result = evaluate(candidate, len(finished))
        log.append(result)
        study.add_trial(_as_trial(space, result))
        finished.append(result)
        done.add(candidate)
    return finished


def _next_candidate(
    space: Sequence[Knob],
    study: optuna.Study,
    done: set[Candidate],
    seed: int,
    count: int,
    strategy: str,
) -> Candidate | None:
    """Return a candidate that was not evaluated yet, or None when the space is spent."""
    for candidate in first_candidates(space):
        if candidate not in done:
            return candidate
    left = [
        candidate
        for values in itertools.product(*(knob.choices for knob in space))
        if (
            candidate := Candidate.from_values(
                dict(zip((knob.name for knob in space), values, strict=True))
            )
        )
        not in done
    ]
    if not left:
        return None
    trial_seed = int.from_bytes(hashlib.sha256(f"{seed}/{count}".encode()).digest()[:4], "big")
    if strategy == "random":
        return random.Random(trial_seed).choice(left)
    study.sampler = optuna.samplers.TPESampler(seed=trial_seed, n_startup_trials=3)
    trial = study.ask(_distributions(space))
    asked = Candidate.from_values(trial.params)
    # The answer goes to the study as a trial of its own, so this question is closed.
    study.tell(trial, state=optuna.trial.TrialState.FAIL)
    if asked not in done:
        return asked
    # The sampler repeats itself in small spaces: take the nearest candidate that is left.
    values = asked.values()
    return min(left, key=lambda each: (sum(each.values()[k] != values[k] for k in values), each))


def _inside(space: Sequence[Knob], candidate: Candidate) -> bool:
    """Return whether the knobs offer a candidate; those of a machine with more cores may not."""
    values = candidate.values()
    return all(values[knob.name] in knob.choices for knob in space)


def _distributions(
    space: Sequence[Knob],
) -> dict[str, optuna.distributions.BaseDistribution]:
    return {
        knob.name: optuna.distributions.CategoricalDistribution(knob.choices) for knob in space
    }


def _as_trial(space: Sequence[Knob], result: TrialResult) -> optuna.trial.FrozenTrial:
    """Return a finished trial as Optuna keeps it."""
    failed = result.failed is not None
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.COMPLETE,
        values=[FAILED_COST, 100.0] if failed else [result.cost, result.loss],
        params=result.candidate.values(),
        distributions=_distributions(space),
        user_attrs={"number": result.number, "failed": result.failed},
        constraints={"failed": 1.0} if failed else {"failed": 0.0, **result.violations},
    )
