"""Optuna's study of a search: told of finished trials, and shared by workers where a database is.

What a sampler learns from is made anew from the log at every start.  With a storage that workers
share, a candidate is claimed before it is evaluated: a running trial of the study.  Of two claims
on one candidate the earlier holds.  A claim whose worker died is found by its heart, which
stopped, and is run again by whoever comes next.  Only results of one device are in a study.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError, ProgrammingError, SQLAlchemyError

from engines.errors import CadenzaError, InputError
from tuner.space import Candidate, Knob, offers
from tuner.trials import TrialResult

# What a failed candidate is told to the sampler as, so that it keeps away from its like: a bad
# point that misses a constraint.  A trial that is told FAIL would teach it nothing.
FAILED = (1e12, 100.0, 1e12)

# Seconds between two beats of a worker's heart, and after how many a silent one is dead.
BEAT_S = 10
GRACE_S = 60

# How often the tables of a database are looked for while others make them.
_TRIES = 10


@dataclass
class Study:
    """Optuna's study of one search.

    Attributes:
        own: Told of all finished trials; what its sampler learns from.
        shared: The study in a database that other workers use too, or None.
        database: That database, where hearts beat.
        worker: This worker's name among them.
        grace_s: Seconds after which a worker without a beat is dead.
        device: What is measured on; results of another one neither compete nor guide.
    """

    own: optuna.Study
    shared: optuna.Study | None = None
    database: RDBStorage | None = None
    worker: str = ""
    grace_s: int = GRACE_S
    device: str = ""
    _seen: dict[int, TrialResult] = field(default_factory=dict)

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the shared study's trials in some states; none where nothing is shared."""
        if self.shared is None:
            return []
        return self.shared.get_trials(deepcopy=False, states=states)

    def competing(self, results: Sequence[TrialResult]) -> list[TrialResult]:
        """Return the results of this device; one that names none is taken for its own."""
        return [each for each in results if each.device in ("", self.device) or not self.device]

    def elsewhere(self) -> list[TrialResult]:
        """Return what other workers finished."""
        for trial in self.trials(TrialState.COMPLETE):
            attrs = trial.user_attrs
            if trial.number in self._seen or attrs.get("worker") == self.worker:
                continue
            self._seen[trial.number] = TrialResult.from_json(json.loads(attrs["result"]))
        return list(self._seen.values())


def open_study(
    folder: Path,
    storage: str | None,
    name: str = "cadenza",
    worker: str = "",
    device: str = "",
    grace_s: int = GRACE_S,
) -> Study:
    """Return the study of a tune folder; what its sampler learns from is made anew, from the log.

    Args:
        folder: Where its journal lies, for Optuna's own tools.
        storage: URL of a database that workers share, or None.
        name: Of the study; a database holds those of many commands.
        worker: This worker's name, unlike any other's.
        device: What is measured on: results of other devices are of another study.
        grace_s: Seconds after which a worker without a beat is taken for dead.

    Raises:
        InputError: The database cannot be used, or what is there is no study of ours.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = folder / "study.journal"
    file.unlink(missing_ok=True)
    journal = optuna.storages.JournalStorage(JournalFileBackend(str(file)))
    own = created(journal, name)
    if storage is None:
        return Study(own, device=device)
    shown = redacted(storage)
    where = hashlib.sha256(device.encode()).hexdigest()[:8]
    try:
        database = _database(_with_driver(storage), grace_s)
        study = created(database, f"{name}-{where}")
    except (SQLAlchemyError, ImportError, ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0].rstrip(".").replace(storage, shown)
        raise InputError(
            f"the storage {shown!r} cannot be used: {why}; give the URL of a database, for "
            f"instance sqlite:///study.db or postgresql://user@host/name (pip install "
            f"'cadenza[postgres]')"
        ) from error
    if len(study.directions) != len(FAILED):
        raise InputError(
            f"the storage {shown!r} holds a study {study.study_name!r} with "
            f"{len(study.directions)} objectives, not {len(FAILED)}; name another database"
        )
    return Study(own, study, database, worker, grace_s, device)


def _database(url: str, grace_s: int) -> RDBStorage:
    """Return a database with its tables, made where there are none.

    Workers that begin together may all make them; whoever is not the first looks again.
    """
    for left in reversed(range(_TRIES)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                return RDBStorage(
                    url,
                    heartbeat_interval=min(BEAT_S, max(1, grace_s // 3)),
                    grace_period=grace_s,
                )
        except (IntegrityError, ProgrammingError):
            if not left:
                raise
            time.sleep(0.5)
    raise AssertionError("the last try raises or returns")


def redacted(storage: str) -> str:
    """Return a storage's URL with its password hidden."""
    try:
        return make_url(storage).render_as_string(hide_password=True)
    except (SQLAlchemyError, ValueError):
        head, at, host = storage.rpartition("@")
        return f"***@{host}" if at and head else storage


def _with_driver(storage: str) -> str:
    """Return a URL whose PostgreSQL is reached by psycopg 3, which the extra brings."""
    for scheme in ("postgresql://", "postgres://"):
        if storage.startswith(scheme):
            return "postgresql+psycopg://" + storage.removeprefix(scheme)
    return storage


def created(storage: optuna.storages.BaseStorage, name: str) -> optuna.Study:
    """Return the study of a name: cost, loss and memory, to be made small."""
    return optuna.create_study(
        study_name=name,
        storage=storage,
        directions=["minimize"] * len(FAILED),
        load_if_exists=True,
    )


def claimed(
    space: Sequence[Knob],
    study: Study,
    finished: Sequence[TrialResult],
    following: Callable[[Collection[Candidate]], Candidate | None],
) -> tuple[Candidate, optuna.Trial | None] | None:
    """Return a candidate that nobody evaluated or runs, claimed where others look too; or None.

    Args:
        space: The knobs.
        study: Where claims are.
        finished: Trials.
        following: From the candidates that are taken to the next one.
    """
    done = {result.candidate for result in finished}
    if study.shared is None:
        found = following(done)
        return None if found is None else (found, None)
    _bury(study)
    while True:
        # Others may have finished something since `finished` was read.
        known = study.trials(TrialState.RUNNING, TrialState.COMPLETE)
        taken = done | {_candidate(space, trial) for trial in known}
        left = (
            _candidate(space, trial)
            for trial in study.trials(TrialState.FAIL)
            if "worker" in trial.user_attrs and "yielded" not in trial.user_attrs
        )
        found = next((each for each in left if each not in taken and offers(space, each)), None)
        found = found or following(taken)
        if found is None:
            return None
        claim = _claim(space, study, study.shared, found)
        earlier = [
            trial
            for trial in study.trials(TrialState.RUNNING, TrialState.COMPLETE)
            if trial.number < claim.number and _candidate(space, trial) == found
        ]
        if not earlier:
            return found, claim
        claim.set_user_attr("yielded", True)
        study.shared.tell(claim.number, state=TrialState.FAIL)


def _claim(
    space: Sequence[Knob], study: Study, shared: optuna.Study, candidate: Candidate
) -> optuna.Trial:
    """Return a running trial of a candidate, made in one piece: nobody sees half of it."""
    token = secrets.token_hex(8)
    shared.add_trial(
        optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=candidate.values,
            distributions=distributions(space),
            user_attrs={"worker": study.worker, "claim": token},
        )
    )
    (made,) = (
        trial
        for trial in study.trials(TrialState.RUNNING)
        if trial.user_attrs.get("claim") == token
    )
    return optuna.trial.Trial(shared, made._trial_id)


def publish(study: Study, space: Sequence[Knob], mine: Sequence[TrialResult]) -> None:
    """Tell a shared study what the log has and it has not; leave what a kill cut off here."""
    if study.shared is None:
        return
    told = {
        json.loads(trial.user_attrs["result"])["number"]
        for trial in study.trials(TrialState.COMPLETE)
        if trial.user_attrs.get("worker") == study.worker
    }
    for result in mine:
        if result.number not in told and offers(space, result.candidate):
            study.shared.add_trial(as_trial(space, result, study.worker))
    for trial in study.trials(TrialState.RUNNING):
        # The folder's lock is ours, so the process that ran it is dead.
        if trial.user_attrs.get("worker") == study.worker:
            study.shared.tell(trial.number, state=TrialState.FAIL)


def hand_in(study: Study, claim: optuna.Trial, result: TrialResult) -> None:
    """Tell a shared study the result of a claim; one that was buried alive is told anew."""
    assert study.shared is not None, "claims are of shared studies"
    try:
        claim.set_user_attr("result", json.dumps(result.to_json(), allow_nan=False))
        for name, value in _constraints(result).items():
            claim.set_constraint(name, value)
        study.shared.tell(claim, values_of(result))
    except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
        frozen = study.shared.get_trials(deepcopy=False)[claim.number]
        if frozen.state != TrialState.COMPLETE:
            study.shared.add_trial(
                optuna.trial.create_trial(
                    state=TrialState.COMPLETE,
                    values=values_of(result),
                    params=frozen.params,
                    distributions=frozen.distributions,
                    user_attrs=_attrs(result, study.worker),
                    constraints=_constraints(result),
                )
            )


def _bury(study: Study) -> None:
    """End the claims of workers whose heart stopped, or never began to beat."""
    assert study.shared is not None, "claims are of shared studies"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study.shared)
    for trial in study.trials(TrialState.RUNNING):
        begun = trial.datetime_start
        age = 0.0 if begun is None else (datetime.now() - begun).total_seconds()
        if "beats" not in trial.user_attrs and age > study.grace_s:
            with suppress(optuna.exceptions.UpdateFinishedTrialError, ValueError):
                study.shared.tell(trial.number, state=TrialState.FAIL)


@contextmanager
def beating(study: Study, claim: optuna.Trial | None) -> Iterator[None]:
    """Let the heart of a claim beat while it is evaluated; broken off, the claim is left."""
    database = study.database
    if claim is None or study.shared is None or database is None:
        yield
        return
    interval = database.get_heartbeat_interval()
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(interval):
            with suppress(SQLAlchemyError, optuna.exceptions.StorageInternalError):
                database.record_heartbeat(claim._trial_id)

    database.record_heartbeat(claim._trial_id)
    claim.set_user_attr("beats", True)
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        with suppress(SQLAlchemyError, optuna.exceptions.OptunaError, ValueError):
            study.shared.tell(claim, state=TrialState.FAIL)
        raise
    finally:
        stop.set()
        thread.join()


@contextmanager
def reached() -> Iterator[None]:
    """Tell of a database that went away with the mend."""
    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        why = str(error.__cause__ or error).partition("\n")[0]
        raise CadenzaError(
            f"the storage went away: {why}; what is finished is in the log, and the same command "
            f"goes on when the storage is back"
        ) from error


def _candidate(space: Sequence[Knob], trial: FrozenTrial) -> Candidate:
    """Return the candidate of a trial, as far as its knobs are known yet."""
    params = trial.params
    return Candidate(tuple((k.name, params[k.name]) for k in space if k.name in params))


def distributions(space: Sequence[Knob]) -> dict[str, optuna.distributions.BaseDistribution]:
    """Return the knobs as Optuna knows them."""
    return {
        knob.name: optuna.distributions.CategoricalDistribution(knob.choices) for knob in space
    }


def values_of(result: TrialResult) -> list[float]:
    """Return the three objectives of a result."""
    if result.failed is not None:
        return list(FAILED)
    return [result.cost, result.loss, result.memory_mib]


def _constraints(result: TrialResult) -> dict[str, float]:
    if result.failed is not None:
        return {"failed": 1.0}
    return {"failed": 0.0, **result.violations}


def _attrs(result: TrialResult, worker: str) -> dict[str, Any]:
    return {"worker": worker, "result": json.dumps(result.to_json(), allow_nan=False)}


def as_trial(space: Sequence[Knob], result: TrialResult, worker: str = "") -> FrozenTrial:
    """Return a finished trial as Optuna keeps it."""
    return optuna.trial.create_trial(
        state=TrialState.COMPLETE,
        values=values_of(result),
        params=result.candidate.values,
        distributions=distributions(space),
        user_attrs=_attrs(result, worker) if worker else {"number": result.number},
        constraints=_constraints(result),
    )
