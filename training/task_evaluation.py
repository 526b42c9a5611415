"""Evaluation of a model on a synthetic task at several lengths, and by where the answers stood."""

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool, Int

from data.documents import BYTES, Document
from data.loader import Batch
from data.synthetic_tasks import Task
from models.gpt import GPT
from training.evaluation import Scores, check_positions, make_scorer, position_bins

By = Literal["depth", "distance"]
DEPTHS = 10
"""Number of equal parts of a document, by which answers are grouped."""


def evaluate_task(model: GPT, task: Task, *, lengths: Sequence[int], documents: int, tokens_at_once: int,
                  segments: bool = True, progress: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Evaluates a model on val documents of a task, generated at each length.

    Args:
        model: the model.
        task: the task, whose own length does not matter.
        lengths: tokens of the documents, each of which is a window of its own.
        documents: number of documents of each length.
        tokens_at_once: tokens per forward pass, at least one document.
        segments: whether the model gets segment ids, as with ``data.packing documents``; a window is one document in
            either case.
        progress: called with a line at the start of each length.

    Returns:
        For each length ``length``, ``documents``, ``tokens`` (scored), ``accuracy`` and ``loss`` (nats per token) over
        all of them, ``accuracy_last`` and ``loss_last`` over the last of each document and, for tasks whose answers
        stand in the document, ``depth`` and ``distance``: lists of ``first``, ``last``, ``tokens``, ``accuracy`` and
        ``loss`` of the tokens whose answer stood ``first`` to ``last`` percent into the document, or tokens before.

    Raises:
        ConfigError: a length does not fit the task or the model's positions.
    """
    tasks = [task.at_length(length) for length in lengths]
    check_positions(model, lengths)
    score = make_scorer(model, tokens_at_once)
    found = []
    for each in tasks:
        progress(f"{each.name()}: {documents:,} documents of {each.length:,} tokens")
        chosen = list(islice(each.split("val"), documents))
        batch = windows_of(chosen, segments=segments)
        scores, scored_NT = score(batch), np.asarray(batch.targets_BT) >= 0
        last_NT = scored_NT & (scored_NT[:, ::-1].cumsum(axis=1)[:, ::-1] == 1)
        last = _figures(scores, last_NT)
        entry: dict[str, Any] = {"length": each.length, "documents": documents, **_figures(scores, scored_NT),
                                 "accuracy_last": last["accuracy"], "loss_last": last["loss"]}
        answers = [document.answers_L for document in chosen if document.answers_L is not None]
        if len(answers) == documents:
            there_NT = np.where(scored_NT, np.stack(answers), -1)
            entry |= {by: [{"first": first, "last": last, **_figures(scores, inside_NT)}
                           for first, last, inside_NT in _bins(there_NT, by) if inside_NT.any()]
                      for by in get_args(By)}
        found.append(entry)
    return found


def windows_of(documents: Sequence[Document], *, segments: bool = True) -> Batch:
    """Documents of equal length, each a window of its own, as with ``data.packing documents`` or, without segment ids,
    ``rows``."""
    ids_NT = np.stack([document.ids_L for document in documents]).astype(np.int32)
    inputs_NT = np.pad(ids_NT[:, :-1], [(0, 0), (1, 0)], constant_values=BYTES.separator)
    targets_NT = np.stack([np.where(document.weights_L == 0, -1, document.ids_L if document.targets_L is None
                                    else document.targets_L) for document in documents])
    return Batch(inputs_NT, targets_NT.astype(np.int32), np.zeros_like(ids_NT) if segments else None)


def _bins(answers_NT: Int[np.ndarray, "N T"], by: By) -> list[tuple[int, int, Bool[np.ndarray, "N T"]]]:
    """The first and last value of each group of tokens, and which tokens have an answer in it."""
    there_NT, length = answers_NT >= 0, answers_NT.shape[1]
    if by == "depth":
        part_NT = answers_NT * DEPTHS // length
        return [(100 * part // DEPTHS, 100 * (part + 1) // DEPTHS, there_NT & (part_NT == part))
                for part in range(DEPTHS)]
    distance_NT = np.arange(length) - answers_NT
    return [(first, last, there_NT & (distance_NT >= first) & (distance_NT <= last))
            for first, last in position_bins(length)]


def _figures(scores: Scores, chosen_NT: Bool[np.ndarray, "N T"]) -> dict[str, Any]:
    loss = float(scores.loss_BT[chosen_NT].mean())
    return {"tokens": int(chosen_NT.sum()), "accuracy": float(scores.right_BT[chosen_NT].mean()),
            "loss": loss if math.isfinite(loss) else None}
