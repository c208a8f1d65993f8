"""The tasks of the reference checkpoint: how a prompt is drawn, and when an answer is right.

Five small tasks, each with an exact grader.  They differ in *where* the scored information is
decided, because that is what a schedule over denoising windows can use:

    edit     copy with a substitution, then its mirror image; fixed length, no end-of-text padding
    rename   choose unused letters for X and Y, then use them everywhere; many answers are right
    chain    running sums modulo 5; only the last digit, the end of the answer, is scored
    most     the most frequent letter, then free chatter; only the start of the answer is scored
    close    close the open brackets in the right order; the answer ends with end-of-text padding

Knows nothing about models, tokenizers or engines.  Standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

LETTERS = "abcdefghijklmnop"
DIGITS = "0123456789"
BRACKETS = {"(": ")", "[": "]", "{": "}", "<": ">"}
# Which letters each placeholder may be renamed to: with letters of its own, two names that are
# chosen in the same step cannot collide.
PLACEHOLDERS = {"X": LETTERS[:8], "Y": LETTERS[8:]}

GEN_LENGTH = 24
STEPS = 12
CHAIN_MODULUS = 5
CHAIN_LENGTH = 16
MOST_LENGTH = 18
MOST_LETTERS = 4


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of prompt with its grader and the sampler settings that it is meant for.

    Attributes:
        name: What `--task` calls it.
        draw: Returns a fresh (prompt, right answer) from a seeded generator.
        grade: Whether the generated text answers the prompt.
        scored: Which of the answer's tokens the grader reads.
        practice: As `draw`, from a wider range that training needs; None where `draw` will do.
        gen_length: Tokens to generate.
        steps: Denoising steps; divides gen_length by a whole number of tokens a step.
        block_length: Tokens a block; the whole answer is one block.
        says: What the task asks for, in a line.
    """

    name: str
    draw: Callable[[random.Random], tuple[str, str]]
    grade: Callable[[str, str], bool]
    scored: Literal["all", "start", "end"]
    says: str
    practice: Callable[[random.Random], tuple[str, str]] | None = None
    gen_length: int = GEN_LENGTH
    steps: int = STEPS
    block_length: int = GEN_LENGTH


def _draw_edit(rng: random.Random) -> tuple[str, str]:
    old, new = rng.sample(LETTERS[:8], 2)
    text = "".join(rng.choice(LETTERS[:8]) for _ in range(GEN_LENGTH // 2))
    edited = text.replace(old, new)
    return f"edit:{old}{new},{text}", edited + edited[::-1]


def _grade_edit(prompt: str, answer: str) -> bool:
    swap, text = prompt.removeprefix("edit:").split(",")
    edited = text.replace(swap[0], swap[1])
    return answer == edited + edited[::-1]


def _draw_rename(rng: random.Random) -> tuple[str, str]:
    used = rng.sample(LETTERS[:8], 5) + rng.sample(LETTERS[8:], 5)
    length = rng.randint(14, 20)
    symbols = ["X"] * rng.randint(3, 5) + ["Y"] * rng.randint(2, 4)
    symbols += [rng.choice(used) for _ in range(length - len(symbols))]
    rng.shuffle(symbols)
    text = answer = "".join(symbols)
    for placeholder, letters in PLACEHOLDERS.items():
        fresh = rng.choice([letter for letter in letters if letter not in text])
        answer = answer.replace(placeholder, fresh)
    return f"rename:{text}", answer


def _grade_rename(prompt: str, answer: str) -> bool:
    text = prompt.removeprefix("rename:")
    if len(answer) != len(text):
        return False
    chosen: dict[str, str] = {}
    for asked, given in zip(text, answer, strict=True):
        if asked in PLACEHOLDERS:
            if given not in PLACEHOLDERS[asked] or given in text:
                return False
            if chosen.setdefault(asked, given) != given:
                return False
        elif asked != given:
            return False
    return True


def _draw_chain(rng: random.Random) -> tuple[str, str]:
    digits = [rng.randrange(CHAIN_MODULUS) for _ in range(CHAIN_LENGTH)]
    total, sums = 0, []
    for digit in digits:
        total = (total + digit) % CHAIN_MODULUS
        sums.append(str(total))
    return "chain:" + "".join(map(str, digits)), "".join(sums)


def _grade_chain(prompt: str, answer: str) -> bool:
    total = sum(map(int, prompt.removeprefix("chain:"))) % CHAIN_MODULUS
    return answer.endswith(str(total))


def _draw_most(rng: random.Random) -> tuple[str, str]:
    letters = rng.sample(LETTERS, MOST_LETTERS)
    while True:
        text = "".join(rng.choice(letters) for _ in range(MOST_LENGTH))
        first, second = sorted((text.count(letter) for letter in letters), reverse=True)[:2]
        if first > second:
            break
    winner = max(letters, key=text.count)
    at = rng.randrange(len(LETTERS))
    chatter = []
    for _ in range(GEN_LENGTH - 1):
        chatter.append(LETTERS[at])
        at = (at + rng.choice((-1, 1))) % len(LETTERS)
    return f"most:{text}", winner + "".join(chatter)


def _grade_most(prompt: str, answer: str) -> bool:
    text = prompt.removeprefix("most:")
    return answer[:1] == max(set(text), key=text.count)


def _draw_close(rng: random.Random, shortest: int = 18) -> tuple[str, str]:
    length = rng.randint(shortest, 20)
    open_now: list[str] = []
    text = ""
    for _ in range(length):
        if open_now and rng.random() < 0.22:
            text += open_now.pop()
        else:
            opener = rng.choice("([{<")
            open_now.append(BRACKETS[opener])
            text += opener
    return f"close:{text}", "".join(reversed(open_now))


def _grade_close(prompt: str, answer: str) -> bool:
    open_now: list[str] = []
    for symbol in prompt.removeprefix("close:"):
        if symbol in BRACKETS:
            open_now.append(BRACKETS[symbol])
        else:
            open_now.pop()
    return answer == "".join(reversed(open_now))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("edit", _draw_edit, _grade_edit, "all", "substitute a letter, then add the mirror"),
        Task("rename", _draw_rename, _grade_rename, "all", "name X and Y freely, use the names"),
        Task("chain", _draw_chain, _grade_chain, "end", "running sums modulo 5, last one scored"),
        Task("most", _draw_most, _grade_most, "start", "the most frequent letter, then chatter"),
        Task(
            "close",
            _draw_close,
            _grade_close,
            "all",
            "close the open brackets in order",
            practice=partial(_draw_close, shortest=10),
        ),
    )
}
