"""Packing of documents into windows, by best-fit decreasing."""

import bisect
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64


class Packing(NamedTuple):
    """P documents or parts of them, in the order of windows: window w has ``bounds_W[w]`` to ``bounds_W[w + 1]``."""

    starts_P: Int64[np.ndarray, " P"]
    """Positions of their first targets in the split."""
    lengths_P: Int32[np.ndarray, " P"]
    """Number of targets of each."""
    bounds_W: Int64[np.ndarray, " W+1"]


def pack_documents(starts_N: Int64[np.ndarray, " N"], lengths_N: Int64[np.ndarray, " N"], context: int) -> Packing:
    """Packs documents into windows of ``context`` positions, one for each target.

    A document longer than a window is cut into parts. Windows are in the order of their first documents, so that evenly
    spaced windows are evenly spaced in the text.

    Args:
        starts_N: position of the first target of each document in the split.
        lengths_N: number of its targets, which are consecutive.
        context: positions per window.
    """
    parts_N = -(-lengths_N // context)
    document_P = np.repeat(np.arange(len(starts_N)), parts_N)
    part_P = np.arange(len(document_P)) - np.repeat(np.cumsum(parts_N) - parts_N, parts_N)
    starts_P = starts_N[document_P] + part_P * context
    lengths_P = np.minimum(lengths_N[document_P] - part_P * context, context)
    window_P = best_fit(lengths_P, context)
    count = int(window_P.max(initial=-1)) + 1
    first_W = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first_W, window_P, starts_P)
    rank_W = np.empty(count, np.int64)
    rank_W[np.argsort(first_W)] = np.arange(count)
    window_P = rank_W[window_P]
    order_P = np.argsort(window_P, kind="stable")  # the parts are already in the order of the text
    return Packing(starts_P[order_P], lengths_P[order_P].astype(np.int32),
                   np.searchsorted(window_P[order_P], np.arange(count + 1)))


def best_fit(lengths_P: Int64[np.ndarray, " P"], context: int) -> Int64[np.ndarray, " P"]:
    """The window of each of P documents of 1 to ``context`` tokens, by best-fit decreasing.

    Documents of equal length are placed together, so that the loop is over lengths, not documents. Krell et al.,
    "Efficient Sequence Packing without Cross-contamination", 2021.
    """
    order = np.argsort(-lengths_P, kind="stable")
    window_P = np.empty(len(lengths_P), np.int64)
    opened = 0
    rooms: list[int] = []  # free space of windows, ascending
    windows_with: dict[int, list[np.ndarray]] = {}
    values, counts = np.unique(lengths_P, return_counts=True)
    done = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        stop = done + count
        while done < stop:
            fitting = bisect.bisect_left(rooms, length)
            room = rooms.pop(fitting) if fitting < len(rooms) else context
            each = room // length
            if room in windows_with:
                windows_W = np.concatenate(windows_with.pop(room))
            else:
                windows_W = opened + np.arange(-(-(stop - done) // each))
                opened += len(windows_W)
            used = min(len(windows_W), -(-(stop - done) // each))
            placed = min(stop - done, used * each)
            window_P[order[done : done + placed]] = np.repeat(windows_W[:used], each)[:placed]
            done += placed
            in_last = placed - (used - 1) * each
            for left, windows in ((room - each * length, windows_W[: used - 1]),
                                  (room - in_last * length, windows_W[used - 1 : used]), (room, windows_W[used:])):
                if left and len(windows):
                    if left not in windows_with:
                        bisect.insort(rooms, left)
                    windows_with.setdefault(left, []).append(windows)
    return window_P
