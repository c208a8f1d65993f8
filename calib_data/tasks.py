"""The tasks of the reference checkpoint: how a prompt is drawn, and when an answer is right.

Five small tasks, each with an exact grader.  They differ in *where* the scored information is
decided, because that is what a schedule over denoising windows can use:

    edit     copy with a substitution, then its mirror image; fixed length, no end-of-text padding
    rename   choose two unused letters, then use them everywhere; many right answers, so checked
    chain    running sums modulo 5; only the last digit, the end of the answer, is scored
    lookup   the values of two keys, then free chatter; only the start of the answer is scored
    close    close the open brackets in the right order; the answer ends with end-of-text padding

Knows nothing about models, tokenizers or engines.  Standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

LETTERS = "abcdefghijklmnop"
DIGITS = "0123456789"
BRACKETS = {"(": ")", "[": "]", "{": "}", "<": ">"}
PLACEHOLDERS = "XY"

GEN_LENGTH = 24
STEPS = 12
CHAIN_MODULUS = 5
CHAIN_LENGTH = 16
LOOKUP_KEYS = 2


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of prompt with its grader and the sampler settings that it is meant for.

    Attributes:
        name: What `--task` calls it.
        draw: Returns a fresh (prompt, right answer) from a seeded generator.
        grade: Whether the generated text answers the prompt.
        scored: Which of the answer's tokens the grader reads.
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
    used = rng.sample(LETTERS, rng.randint(7, 10))
    length = rng.randint(14, 20)
    symbols = ["X"] * rng.randint(3, 5) + ["Y"] * rng.randint(2, 4)
    symbols += [rng.choice(used) for _ in range(length - len(symbols))]
    rng.shuffle(symbols)
    text = "".join(symbols)
    fresh = rng.sample([letter for letter in LETTERS if letter not in text], 2)
    return f"rename:{text}", text.replace("X", fresh[0]).replace("Y", fresh[1])


def _grade_rename(prompt: str, answer: str) -> bool:
    text = prompt.removeprefix("rename:")
    if len(answer) != len(text):
        return False
    chosen = {symbol: set[str]() for symbol in PLACEHOLDERS}
    for asked, given in zip(text, answer, strict=True):
        if asked in chosen:
            chosen[asked].add(given)
        elif asked != given:
            return False
    names = [name for group in chosen.values() for name in group]
    each_one = all(len(group) <= 1 for group in chosen.values())
    fresh = all(name in LETTERS and name not in text for name in names)
    return each_one and fresh and len(set(names)) == len(names)


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


def _draw_lookup(rng: random.Random) -> tuple[str, str]:
    keys = rng.sample(LETTERS, 7)
    table = {key: rng.choice(DIGITS) for key in keys}
    asked = rng.sample(keys, LOOKUP_KEYS)
    at = rng.randrange(len(LETTERS))
    chatter = []
    for _ in range(GEN_LENGTH - LOOKUP_KEYS):
        chatter.append(LETTERS[at])
        at = (at + rng.choice((-1, 1))) % len(LETTERS)
    prompt = (
        "lookup:" + "".join(key + value for key, value in table.items()) + "," + "".join(asked)
    )
    return prompt, "".join(table[key] for key in asked) + "".join(chatter)


def _grade_lookup(prompt: str, answer: str) -> bool:
    pairs, asked = prompt.removeprefix("lookup:").split(",")
    table = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return answer[:LOOKUP_KEYS] == "".join(table[key] for key in asked)


def _draw_close(rng: random.Random) -> tuple[str, str]:
    length = rng.randint(10, 20)
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
        Task("lookup", _draw_lookup, _grade_lookup, "start", "values of two keys, then chatter"),
        Task("close", _draw_close, _grade_close, "all", "close the open brackets in order"),
    )
}
