"""The questions of harness tasks: the part that each belongs to, its prompt, and its judgement.

What `calib_data/harness.py` has loaded is asked for through the tasks' own methods; this file
decides only who may see which question.  Questions are told apart by a digest of their text
without examples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from calib_data.errors import WorkloadError, shorten
from calib_data.harness import HarnessSpec, foreign
from calib_data.prompt_file import is_unicode
from calib_data.prompts import Prompt, Split

SEED = 1234  # of the examples in a prompt

# In whose proportion one split is cut, where no numbers are asked for: T2Quant's, and as many to
# tune as to calibrate.
_SIZES: dict[Split, int] = {"calibration": 256, "tuning": 256, "test": 512}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a question lies: a document of a split of a task of the harness."""

    task: str
    split: str
    index: int

    @property
    def id(self) -> str:
        """Name it for ever, as long as the data stay as they are."""
        return f"{self.task}/{self.split}/{self.index}"


class Questions:
    """The questions of one workload, as tasks of the harness hold them.

    Keeps where the prompts that it drew came from, so that their answers can be judged.
    """

    def __init__(self, spec: HarnessSpec, tasks: Mapping[str, Any]) -> None:
        """Sort the questions into parts and try each task's judgement on an empty answer.

        Raises:
            WorkloadError: A task has no split to judge on, or no filter or metric of that name.
        """
        self._spec, self._tasks = spec, tasks
        self._docs: dict[tuple[str, str], Sequence[Any]] = {}
        self._at: dict[str, list[Place]] = {}
        self._part: dict[str, Split] = {}
        self._learn: list[Place] = []
        self._asked: dict[str, list[Place]] = {}
        # What was judged once: schedules often answer alike, and judging may run a program.
        self._verdicts: dict[tuple[str, str], bool] = {}
        self._metrics: dict[str, str] = {}
        self._examples: dict[str, dict[str, Any]] = {}
        with foreign(
            f"the data of the harness's {spec.task!r} cannot be read", "see its task file"
        ):
            self._sort()
            for name in tasks:
                self._judge(next(place for place in self._places() if place.task == name), "")

    @property
    def count(self) -> int:
        """How many questions there are, those to learn from included."""
        return len(self._at) + len(self._learn)

    def rule(self) -> str:
        """Return how answers are judged, as text: equal texts judge alike."""
        filters = sorted({self._filter(task).name for task in self._tasks.values()})
        versions = sorted({str(getattr(task, "VERSION", "")) for task in self._tasks.values()})
        return (
            f"filter {' '.join(filters)}, metric {' '.join(sorted(set(self._metrics.values())))}, "
            f"version {' '.join(versions)}, lm-eval {version('lm_eval')}"
        )

    def draw(self, split: Split, count: int, seed: int) -> list[Prompt]:
        """Return up to `count` different prompts of a part, in an order of the seed's.

        Raises:
            WorkloadError: The part is empty, or the task's code fails.
        """
        most = getattr(self._spec, split, None)
        wanted = 0 if split == "train" else min(count, most or count)
        found: dict[str, Prompt] = {}
        left_out = 0
        with foreign(f"the harness's {self._spec.task!r} gives no prompt", "see its task file"):
            for place in self._ordered(split, seed):
                if len(found) == wanted:
                    break
                prompt = self._prompt(place)
                if len(prompt.prompt) > (self._spec.longest or len(prompt.prompt)):
                    left_out += 1
                elif is_unicode(prompt.prompt) and prompt.prompt.strip():
                    found.setdefault(prompt.prompt, prompt)
                    self._asked[prompt.prompt] = self._at.get(self._key(place), [place])
        if wanted and not found:
            raise WorkloadError(
                f"the harness's {self._spec.task!r} has no {split} prompts ({left_out} were too "
                f"long); raise longest=, ask for more {split}=, or choose another task"
            )
        return list(found.values())

    def grade(self, prompt: str, text: str) -> bool:
        """Return whether a text answers a prompt that was drawn.

        Raises:
            WorkloadError: The task's code fails, or its metric is not yes or no.
            ValueError: The prompt was not drawn.
        """
        if prompt not in self._asked:
            raise ValueError(f"the prompt {shorten(prompt)} is none that was drawn")
        places = self._asked[prompt]
        if (prompt, text) not in self._verdicts:
            with foreign(f"{places[0].id} cannot be judged", "see its task file"):
                right = any(self._judge(place, text) for place in places)
            self._verdicts[prompt, text] = right
        return self._verdicts[prompt, text]

    def _sort(self) -> None:
        """Give every question of a test side its part, and list those to learn from."""
        cut: dict[str, None] = {}
        for name, task in self._tasks.items():
            if not (task.has_test_docs() or task.has_validation_docs()):
                raise WorkloadError(
                    f"the harness's task {name!r} has no test or validation split to judge on; "
                    f"choose another"
                )
            judged = "test" if task.has_test_docs() else "validation"
            other = next(
                (
                    split
                    for split in ("training", "validation")
                    if split != judged and getattr(task, f"has_{split}_docs")()
                ),
                None,
            )
            for place in self._load(name, judged):
                key = self._key(place)
                self._at.setdefault(key, []).append(place)
                if other is None:
                    cut[key] = None
                else:
                    self._part[key] = "test"
            if other is not None:
                self._learn += self._load(name, other)
        keys = sorted(key for key in cut if key not in self._part)
        sizes = {split: getattr(self._spec, split) or size for split, size in _SIZES.items()}
        done, total = 0.0, sum(sizes.values())
        for split, size in sizes.items():
            start, done = round(done), done + len(keys) * size / total
            self._part.update(dict.fromkeys(keys[start : round(done)], split))

    def _load(self, name: str, split: str) -> list[Place]:
        docs = getattr(self._tasks[name], f"{split}_docs")()
        self._docs[name, split] = docs if hasattr(docs, "__getitem__") else list(docs)
        return [Place(name, split, index) for index in range(len(self._docs[name, split]))]

    def _places(self) -> Iterator[Place]:
        """Yield every place of a test side, then those to learn from."""
        for places in self._at.values():
            yield from places
        yield from self._learn

    def _ordered(self, split: Split, seed: int) -> Iterator[Place]:
        """Yield one place of each question of a part in the order of a digest."""
        own = {self._at[key][0] for key, part in self._part.items() if part == split}
        learn = () if split == "test" else self._learn
        for place in sorted({*own, *learn}, key=lambda each: _hash(f"{seed}/{each.id}")):
            if place in own or self._part_to_learn(place) == split:
                yield place

    def _part_to_learn(self, place: Place) -> Split | None:
        """Return the part of a question to learn from; None if it is a test question repeated."""
        key = self._key(place)
        if key in self._part:
            return None
        calibration = self._spec.calibration or _SIZES["calibration"]
        both = calibration + (self._spec.tuning or _SIZES["tuning"])
        return "calibration" if int(key[:8], 16) * both < calibration * 2**32 else "tuning"

    def _doc(self, place: Place) -> Any:
        return self._docs[place.task, place.split][place.index]

    def _key(self, place: Place) -> str:
        return self._key_of(place.task, self._doc(place))

    def _key_of(self, task: str, doc: Any) -> str:
        return _hash(str(self._tasks[task].doc_to_text(doc)))

    def _prompt(self, place: Place) -> Prompt:
        request = self._request(place, with_examples=True)
        target = self._tasks[place.task].doc_to_target(self._doc(place))
        answer = target if isinstance(target, str) and is_unicode(target) else None
        return Prompt(place.id, str(request.args[0]), answer)

    def _request(self, place: Place, with_examples: bool) -> Any:
        """Return the harness's request for a question.

        Examples depend on the question alone: whatever else is drawn, its prompt is the same.
        """
        task, doc = self._tasks[place.task], self._doc(place)
        shots = (task.config.num_fewshot or 0) if with_examples else 0
        if shots:
            self._restrict_examples(place, shots)
        task.set_fewshot_seed(int(_hash(f"{SEED}/{place.id}")[:8], 16))
        context = task.fewshot_context(doc, num_fewshot=shots, gen_prefix=task.doc_to_prefix(doc))
        made = task.construct_requests(doc, context, metadata=(place.task, place.index, 1))
        requests = made if isinstance(made, list) else [made]
        if len(requests) != 1 or requests[0].request_type != "generate_until":
            raise WorkloadError(
                f"the harness's task {place.task!r} does not ask for one answer a question; "
                f"choose a generative task (output_type generate_until)"
            )
        return requests[0]

    def _restrict_examples(self, place: Place, shots: int) -> None:
        """Let the task draw its examples from what is neither the question nor judges anything."""
        task, key = self._tasks[place.task], self._key(place)
        if not hasattr(task, "sampler"):
            raise WorkloadError(
                f"the harness's task {place.task!r} draws its examples in a way of its own, which "
                f"could show the answer; give ?fewshot=0"
            )
        if place.task not in self._examples:
            known = {self._key_of(place.task, doc): doc for doc in task.fewshot_docs()}
            self._examples[place.task] = {
                own: doc
                for own, doc in known.items()
                if self._part.get(own) in (None, "calibration")
            }
        pool = [doc for own, doc in self._examples[place.task].items() if own != key]
        # Where examples come from the split that judges, the harness draws one more than it needs.
        needs = shots + (task.fewshot_cfg.split == task.config.test_split)
        if len(pool) < needs:
            raise WorkloadError(
                f"{place.id}: {needs} examples are needed, and {len(pool)} may be shown; give a "
                f"smaller ?fewshot="
            )
        task.sampler.replace_df(pool)

    def _filter(self, task: Any) -> Any:
        """Return the filter that decides: the one asked for, or the task's first."""
        known = {each.name: each for each in task._filters}
        name = self._spec.filter or next(iter(known))
        if name not in known:
            raise WorkloadError(
                f"the harness's task {task.config.task!r} has no filter {name!r}; choose one of "
                f"{', '.join(known)}"
            )
        return known[name]

    def _judge(self, place: Place, text: str) -> bool:
        task, request = self._tasks[place.task], self._request(place, with_examples=False)
        stops = (request.args[1] or {}).get("until") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.partition(stop)[0] if stop else text
        request.resps = [text]
        chosen = self._filter(task)
        chosen.apply([request])
        found = task.process_results(self._doc(place), [request.filtered_resps[chosen.name]])
        asked = self._spec.metric
        name = asked or self._metrics.get(place.task) or next(iter(found), "")
        if name not in found:
            raise WorkloadError(
                f"the harness's task {place.task!r} has no metric {name!r}; choose one of "
                f"{', '.join(found)}"
            )
        self._metrics[place.task] = name
        value = found[name]
        if not isinstance(value, bool | int | float | np.generic) or value not in (0, 1):
            raise WorkloadError(
                f"{place.id}: the metric {name!r} says {shorten(value)}, not right (1) or wrong "
                f"(0); choose another metric= of {', '.join(found)}, or another task"
            )
        return bool(value)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
