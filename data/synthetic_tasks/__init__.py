"""Synthetic tasks, generated as corpora, to measure what an attention can do.

``data.source`` names a task and its settings, all with defaults: ``copy:length=128,symbols=10`` or
``mqar:length=64,pairs=8``. Every document has ``length`` tokens; with ``data.packing documents`` and an equal
``model.context``, a document is one window. Only answers are scored, so that loss and accuracy are theirs. Symbols are
bytes (``data.tokenizer bytes``), printable ones first.
"""

import difflib
import re
from typing import Any, get_args, get_type_hints

from data.synthetic_tasks.copying import Copy, Induction, SelectiveCopy
from data.synthetic_tasks.mad import (
    FuzzyInContextRecall,
    InContextRecall,
    Memorization,
    NoisyInContextRecall,
    SelectiveCopying,
)
from data.synthetic_tasks.reasoning import Depo, Mano
from data.synthetic_tasks.recall import Compositional, Mqar, Needle, Rebind
from data.synthetic_tasks.state_tracking import Counter, Dyck, Words
from data.synthetic_tasks.task import Task
from support.errors import ConfigError

TASKS: dict[str, type[Task]] = {task.name(): task for task in (
    Words, Dyck, Counter, Mqar, Rebind, Compositional, Needle, Copy, SelectiveCopy, Induction, InContextRecall,
    FuzzyInContextRecall, NoisyInContextRecall, SelectiveCopying, Memorization, Depo, Mano)}


def parse(source: str) -> Task | None:
    """The task of a ``data.source``; None for other sources.

    Raises:
        ConfigError: a setting is unknown, not one of its values, or inconsistent with others; or the source has
            settings like a task, and there is none of its name.
    """
    name, _, rest = source.partition(":")
    if name not in TASKS:
        if re.match(r"[\w-]+=", rest):
            raise ConfigError(f"data.source: no task {name!r}{_perhaps(name, TASKS)}; expected one of "
                              f"{', '.join(TASKS)}")
        return None
    types = get_type_hints(TASKS[name])
    known = list(vars(TASKS[name]()))
    settings: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if key not in known:
            raise ConfigError(f"data.source: {name} has no setting {key!r}{_perhaps(key, known)}; expected one of "
                              f"{', '.join(known)}")
        if words := get_args(types[key]):
            if value not in words:
                raise ConfigError(f"data.source: {source}: expected {' or '.join(f'{key}={word}' for word in words)}, "
                                  f"found {part!r}{_perhaps(value, words)}")
        elif not equals or not value.isdecimal():
            raise ConfigError(f"data.source: {source}: expected a whole number in {name}:{key}=NUMBER, found {part!r}")
        if key in settings:
            raise ConfigError(f"data.source: {source} sets {key} twice")
        settings[key] = value if words else int(value)
    task = TASKS[name](**settings)
    task.check()
    return task


def similar_task(source: str) -> str | None:
    """The task that a source may mean whose name is none, such as ``mqr``."""
    return next(iter(difflib.get_close_matches(source.partition(":")[0], TASKS, n=1, cutoff=0.75)), None)


def _perhaps(name: str, known: Any) -> str:
    """The nearest known name, for a message."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; perhaps you meant {close[0]}" if close else ""
