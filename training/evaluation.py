"""Evaluation: loss by position in the context, and the gain over a short window."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from data.loader import Batch, Corpora, fixed_batches, fixed_windows, units_per_token
from data.loader import windows as open_windows
from data.token_classes import Partition, partitions
from data.token_files import TokenFiles
from models.gpt import GPT
from support.errors import ConfigError, DataError
from training.sharding import batch_sharding, put
from training.window_losses import ClassLosses, WindowLosses, windows_checksum


class Scores(NamedTuple):
    """Scores of each target, in host memory; 0 and False if a target is not scored."""

    loss_BT: Float[np.ndarray, "B T"]
    """Nats, float64."""
    right_BT: Bool[np.ndarray, "B T"]
    """Whether the target has the highest logit."""


class Evaluation(NamedTuple):
    """Evaluation of the val split of one corpus at one context."""

    figures: dict[str, Any]
    """JSON values; see :func:`evaluate`."""
    windows: WindowLosses
    """The loss of each window, and of its tokens of each class."""


Scorer = Callable[[Batch], Scores]


def check_contexts(model: GPT, corpora: Corpora, contexts: Sequence[int], split: str = "val") -> None:
    """Checks that a model can be evaluated at these contexts on a split of these corpora.

    Raises:
        ConfigError: a context exceeds the model's positions or the split, or there is no split test.
        DataError: there are no tokens.
    """
    for files in corpora.files:
        splits = files.meta["splits"]
        if split not in splits and split != "val":
            raise ConfigError(f"split is {split}; {files.directory} has only {' and '.join(splits)}")
        tokens = files.tokens(split) if split in splits else 0
        if tokens < 2:
            what = "validation" if split == "val" else split
            raise DataError(f"{files.directory}: no {what} tokens; expected a corpus with a {split} split")
        for context in contexts:
            if context >= tokens:
                raise ConfigError(f"context is {context}; expected at most {tokens - 1}: the {split} split of "
                                  f"{files.directory} has {tokens} tokens")
    check_positions(model, contexts)


def check_positions(model: GPT, contexts: Sequence[int]) -> None:
    """Raises :class:`ConfigError` if a context exceeds the model's positions."""
    for context in contexts:
        if context < 1:
            raise ConfigError(f"context is {context}; expected at least 1")
        if model.max_length is not None and context > model.max_length:
            raise ConfigError(f"context is {context}: the model has positions for {model.max_length} tokens and none "
                              f"beyond; expected at most {model.max_length}")


def evaluate(model: GPT, corpora: Corpora, *, contexts: Sequence[int], windows: Sequence[int], tokens: int,
             tokens_at_once: int, packing: str = "stream", split: str = "val", by_token_class: bool = False,
             progress: Callable[[str], None] = lambda _: None) -> list[Evaluation]:
    """Evaluates a model on a split of each corpus, at each context.

    With ``packing="stream"`` all contexts use the same tokens: stretches of the longest context, evenly spaced over the
    split and cut into windows, dropping the rest. With ``"documents"`` the windows of each context are packed
    separately. With ``"rows"``, the context is that of the documents, and there are no short windows: the positions of
    a window would not be those that it had in training.

    Args:
        model: the model.
        corpora: the corpora.
        contexts: T of the windows, checked by :func:`check_contexts`.
        windows: W of :func:`short_windows`, for longer contexts.
        tokens: tokens to evaluate, at least one window.
        tokens_at_once: tokens per forward pass, at least one window.
        packing: as ``data.packing``.
        split: val or test.
        by_token_class: whether to split the loss by classes of tokens, for text.
        progress: called with a line at the start of each part.

    Returns:
        For each corpus and context the loss of each window, and ``corpus``, ``context``, ``trained_context``,
        ``windows``, ``windows_checksum`` (equal for the same windows of tokens), ``tokens`` (scored),
        ``loss`` (nats per token), its ``standard_error``, ``perplexity``, ``bits_per_byte`` (``bits_per_dimension`` for
        images) unless it is text with weights, and ``accuracy`` with weights; ``positions``, a list of ``first``,
        ``last``, ``tokens``, ``loss``, ``standard_error`` (and ``accuracy``) of the tokens with ``first`` to ``last``
        tokens of context; ``short_context``, a list of ``window``, ``least``, ``tokens``, ``loss_window``, ``loss``,
        its ``standard_error`` and ``gain`` (and ``accuracy_window``, ``accuracy``) of the tokens with more than
        ``window`` tokens of context: their loss with the last ``least`` to ``window`` tokens, with all tokens, and the
        difference; and with ``by_token_class`` ``token_classes``, a list of ``partition`` and ``classes``, a list of
        ``class``, ``tokens``, ``share``, ``loss`` and ``standard_error``. Standard errors assume independent windows;
        None if only one window has scored tokens.
    """
    forward = make_scorer(model, tokens_at_once)
    found = []
    for name, files in zip(corpora.names, corpora.files, strict=True):
        for context, batch, positions_BT in _batches(files, split, contexts, tokens, packing):
            progress(f"corpus {name}: context {context:,}, {batch.targets_BT.size:,} tokens")
            scores = forward(batch)
            scored_BT, lengths_BT = np.asarray(batch.targets_BT) >= 0, context_lengths(batch)
            if not scored_BT.any():
                raise DataError(f"{files.directory}: all weights are 0 in the evaluated windows of {split}; expected "
                                "some weights of 1")
            entry: dict[str, Any] = {"corpus": name, "context": context, "trained_context": model.config.context,
                                     "windows": len(scored_BT),
                                     "windows_checksum": windows_checksum(*map(np.asarray, jax.tree.leaves(batch)))}
            entry |= _figures(files, scores, scored_BT)
            loss = entry["loss"]
            entry["perplexity"] = math.exp(loss) if loss < 700 else None
            entry |= Corpora.of(files).bits(loss, [units_per_token(files, split, [batch])])
            entry["positions"] = [
                {"first": first, "last": last, **_figures(files, scores, scored_BT & inside_BT)}
                for first, last in position_bins(context)
                if (scored_BT & (inside_BT := (lengths_BT >= first) & (lengths_BT <= last))).any()]
            entry["short_context"] = []
            for window in windows if packing != "rows" else ():
                beyond_BT = scored_BT & (lengths_BT > window)
                if not beyond_BT.any():
                    continue
                progress(f"corpus {name}: context {context:,}, only the last {window:,} tokens")
                short = short_windows(batch, window)
                of_window = _figures(files, forward(short), np.asarray(short.targets_BT) >= 0)
                of_all = _figures(files, scores, beyond_BT)
                entry["short_context"].append(
                    {"window": window, "least": window - _stride(window) + 1}
                    | {f"{figure}_window": value for figure, value in of_window.items()
                       if figure not in ("tokens", "standard_error")}  # its windows overlap
                    | of_all | {"gain": of_window["loss"] - of_all["loss"]})
            classes: dict[str, ClassLosses] = {}
            if by_token_class:
                progress(f"corpus {name}: context {context:,}, classes of tokens")
                found_partitions = partitions(files, split, batch, positions_BT)
                entry["token_classes"] = [_class_figures(files, scores, one, scored_BT) for one in found_partitions]
                classes = {one.name: _class_losses(scores, one) for one in found_partitions}
            found.append(Evaluation(entry, WindowLosses(
                np.where(scored_BT, scores.loss_BT, 0).sum(axis=1), scored_BT.sum(axis=1).astype(np.int32), classes)))
    return found


def _class_figures(files: TokenFiles, scores: Scores, partition: Partition, scored_BT: Bool[np.ndarray, "B T"],
                   ) -> dict[str, Any]:
    """Tokens, share and loss of each class that has tokens; they add up to those of all tokens."""
    total, classes = int(scored_BT.sum()), []
    for number, name in enumerate(partition.classes):
        if (inside_BT := partition.class_BT == number).any():
            figures = _figures(files, scores, inside_BT)
            classes.append({"class": name, "tokens": figures["tokens"], "share": figures["tokens"] / total,
                            "loss": figures["loss"], "standard_error": figures["standard_error"]})
    loss = sum(each["share"] * each["loss"] for each in classes)
    assert sum(each["tokens"] for each in classes) == total
    assert math.isclose(loss, float(scores.loss_BT[scored_BT].mean()), rel_tol=1e-9) or not math.isfinite(loss)
    return {"partition": partition.name, "classes": classes}


def _class_losses(scores: Scores, partition: Partition) -> ClassLosses:
    inside = [partition.class_BT == number for number in range(len(partition.classes))]
    loss_NK = np.stack([np.where(inside_BT, scores.loss_BT, 0).sum(axis=1) for inside_BT in inside], axis=1)
    tokens_NK = np.stack([inside_BT.sum(axis=1) for inside_BT in inside], axis=1)
    return ClassLosses(partition.classes, loss_NK, tokens_NK.astype(np.int32))


def position_bins(context: int) -> list[tuple[int, int]]:
    """First and last context length of each bin, up to ``context``: 1, 2, 3 to 4, 5 to 8, …"""
    bins = [(1, 1)]
    while bins[-1][1] < context:
        first = bins[-1][1] + 1
        bins.append((first, min(2 * (first - 1), context)))
    return bins


def context_lengths(batch: Batch) -> Int[np.ndarray, "B T"]:
    """Number of context tokens of each target, within its segment; a separator before a document counts. 0 at padding.
    """
    index_BT = np.broadcast_to(np.arange(batch.inputs_BT.shape[1]), batch.inputs_BT.shape)
    if batch.segment_ids_BT is None:
        return index_BT + 1
    segment_ids_BT = np.asarray(batch.segment_ids_BT)
    begins_BT = np.diff(segment_ids_BT, axis=1, prepend=-2) != 0
    starts_BT = np.maximum.accumulate(np.where(begins_BT, index_BT, 0), axis=1)
    return np.where(segment_ids_BT < 0, 0, index_BT - starts_BT + 1)


def short_windows(batch: Batch, window: int) -> Batch:
    """Windows of W = ``window`` tokens that score the targets with more than W tokens of context.

    Exactly W tokens of context for each target would need a forward pass per target. Instead, windows of W tokens have
    a stride of W / 4, and the last W / 4 targets of each are scored. A target has more than three quarters of W and at
    most W tokens of context, about 7/8 W on average, so that the gain is slightly larger than over exactly W tokens.
    Windows start at position 0, like rows in training.

    Returns:
        (N, W) windows, in which each target of ``batch`` with more than W tokens of context is scored exactly once.
    """
    inputs_BT, targets_BT = np.asarray(batch.inputs_BT), np.asarray(batch.targets_BT)
    targets_BT = np.where(context_lengths(batch) > window, targets_BT, -1)
    T, stride = inputs_BT.shape[1], _stride(window)
    # The last window ends with the row, and scores the remaining targets.
    firsts = np.arange(window, T, stride)
    ends = np.minimum(firsts + stride, T)
    index_NW = ends[:, None] - window + np.arange(window)

    def cut(values_BT: np.ndarray) -> np.ndarray:
        return values_BT[:, index_NW].reshape(-1, window)

    targets_NW = np.where(np.tile(index_NW >= firsts[:, None], (len(inputs_BT), 1)), cut(targets_BT), -1)
    scored = (targets_NW >= 0).any(axis=1)
    segment_ids_NW = None if batch.segment_ids_BT is None else cut(np.asarray(batch.segment_ids_BT))[scored]
    return Batch(cut(inputs_BT)[scored], targets_NW[scored], segment_ids_NW)


def _stride(window: int) -> int:
    return max(1, window // 4)


def _batches(files: TokenFiles, split: str, contexts: Sequence[int], tokens: int, packing: str,
             ) -> Iterator[tuple[int, Batch, Int[np.ndarray, "B T"]]]:
    """All windows of each context, as one batch in host memory, and the positions of their targets in the split."""

    def together(context: int) -> tuple[Batch, np.ndarray]:
        count = max(1, tokens // context)
        batches = fixed_batches(files, split, context=context, batch_size=1, count=count, packing=packing)
        rows = open_windows(files, split, context, packing)
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches), np.stack(
            [rows.positions(index) for index in fixed_windows(rows, 1, count).ravel().tolist()])

    stretches = together(max(contexts)) if packing == "stream" else None
    for context in contexts:
        if stretches is None:
            yield context, *together(context)
        else:
            whole = max(contexts) // context * context
            yield context, *jax.tree.map(lambda x, T=context, whole=whole: x[:, :whole].reshape(-1, T), stretches)


def make_scorer(model: GPT, tokens_at_once: int) -> Scorer:
    """``score(batch)``: scores the targets of a batch in host memory, with ``tokens_at_once`` tokens per pass."""
    graph, state = nnx.split(model)
    mesh = jax.sharding.get_mesh()

    @jax.jit
    def score_rows(state: Any, batch: Batch) -> tuple[Array, Array]:
        model = nnx.merge(graph, state)
        segment_ids_BT = None if batch.segment_ids_BT is None else jnp.asarray(batch.segment_ids_BT)
        x_BTE, _ = model.forward(jnp.asarray(batch.inputs_BT), segment_ids_BT=segment_ids_BT)
        return model.head.score(x_BTE, jnp.asarray(batch.targets_BT))

    def score_batch(batch: Batch) -> Scores:
        B, T = batch.inputs_BT.shape
        rows = min(B, max(1, tokens_at_once // T))
        found = []
        for start in range(0, B, rows):
            # If fewer rows are left, repeat the last ones to avoid another compilation.
            stop = min(start + rows, B)
            part: Batch = jax.tree.map(lambda x, stop=stop: x[stop - rows : stop], batch)
            if not mesh.empty:
                part = put(part, batch_sharding(mesh))
            found.append(jax.tree.map(lambda x, skip=start - (stop - rows): np.asarray(x)[skip:],
                                      score_rows(state, part)))
        loss_BT, right_BT = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return Scores(loss_BT.astype(np.float64), right_BT)

    return score_batch


def _figures(files: TokenFiles, scores: Scores, chosen_BT: Bool[np.ndarray, "B T"]) -> dict[str, Any]:
    """Number of chosen targets, their mean loss and its standard error, and their accuracy if the corpus has weights.

    The standard error is clustered by window, since the tokens of a window are not independent.
    """
    tokens, loss = int(chosen_BT.sum()), float(scores.loss_BT[chosen_BT].mean())
    count = int(chosen_BT.any(axis=1).sum())
    excess_B = np.where(chosen_BT, scores.loss_BT - loss, 0).sum(axis=1)
    figures: dict[str, Any] = {"tokens": tokens, "loss": loss, "standard_error": None if count < 2 else float(
        math.sqrt((excess_B**2).sum() * count / (count - 1)) / tokens)}
    if files.weighted:
        figures["accuracy"] = float(scores.right_BT[chosen_BT].mean())
    return figures
