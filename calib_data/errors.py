"""The error of tasks, prompt files, graders and the harness; its message ends with the mend."""

from __future__ import annotations


class WorkloadError(ValueError):
    """A task's name, its prompts or its grader is at fault; the message ends with the mend."""


def shorten(value: object, most: int = 80) -> str:
    """Return a value as one short printable line for a message."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
