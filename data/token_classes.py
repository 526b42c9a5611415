"""Tokens of text by what they are: repeats, letters and brackets, parts of Python, words of prose.

A partition puts every scored token in exactly one class. The tokens of any tokenizer have classes by their text in the
document: a token counts as its first character that is not a space.
"""

import ast
import functools
import io
import keyword
import re
import tokenize
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from data import token_files, tokenizers
from data.loader import Batch
from data.token_files import TokenFiles
from support.errors import ConfigError

REPEATED = (2, 4, 8)
"""Tokens of the n-grams that a repeat completes."""
DISTANCES = (4, 16, 64, 256, 1024)
"""The last distance of each class of distances, in tokens; a last class has all larger ones."""
END = "end of document"
CHARACTERS = ("indentation", "line break", "space", "word start", "word continuation", "number", "opening bracket",
              "closing bracket", "other character", END)
BRACKETS = {ord(b): ord(a) for a, b in ("()", "[]", "{}")}
CODE = ("keyword", "identifier", "number", "string", "comment", "operator", "whitespace", "not Python", END)
PROSE = ("function word", "content word", "number", "other character", "whitespace", END)
PYTHON_SHARE = 0.5
"""Part of the text that has to be Python for its tokens to be classed as code, not as prose."""
_FUNCTION_WORDS = """
a about above across after again against all along also although am among an and another any anybody anyone anything are
around as at away back be became because become been before behind being below beneath beside between beyond both but by
can cannot could d did do does doing don done down during each either else ever every everybody everyone everything for
from had has have having he her here hers herself him himself his how however i if in indeed inside instead into is it
its itself just less like ll m many may me might mine more most much must my myself near neither never no nobody none
nor not nothing now of off often on once one only onto or other others our ours ourselves out outside over own per
perhaps quite rather re s same shall she should since so some somebody someone something soon still such t than that the
their theirs them themselves then there therefore these they this those though through throughout thus till to too
toward towards under until unto up upon us ve very was we were what whatever when whenever where whether which while who
whoever whom whose why will with within without would yet you your yours yourself yourselves
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
"""English words of grammar, without the apostrophes of contractions, whose parts are words here."""


class Partition(NamedTuple):
    """The class of every scored token."""

    name: str
    classes: tuple[str, ...]
    class_BT: Int[np.ndarray, "B T"]
    """Index of the class of each target, −1 where it is not scored."""


def partitions(files: TokenFiles, split: str, batch: Batch, positions_BT: Int[np.ndarray, "B T"]) -> list[Partition]:
    """The partitions of the targets of some windows: repeats of n-grams by distance, characters, closing brackets by
    distance, and parts of Python or words of prose, whichever the text is.

    Args:
        files: the token files.
        split: the split of the windows.
        batch: the windows, in host memory.
        positions_BT: the position in the split of each target.

    Raises:
        ConfigError: tokens are no text, but pixels or the symbols of a generated corpus.
        DataError: the vocabulary on this machine is another one.
    """
    check_text(files)
    text_of = _texts_of(files)
    scored_BT = np.asarray(batch.targets_BT) >= 0
    found = [Partition(f"repeats of {n} tokens", ("first", *distance_names()), _repeats(batch, n)) for n in REPEATED]
    documents = _Documents(files, split, text_of)
    positions = np.where(scored_BT, positions_BT, -1)
    class_of = {name: np.full(scored_BT.shape, -1, np.int64) for name in ("characters", "brackets", "code", "prose")}
    for number in np.unique(documents.number_of(positions[scored_BT])):
        document = documents[int(number)]
        inside_BT = scored_BT & (documents.number_of(positions) == number)
        for name, class_L in document.classes.items():
            class_of[name][inside_BT] = class_L[positions[inside_BT] - document.start]
    opened_BT = class_of.pop("brackets")  # the position of the opening bracket
    found.append(Partition("characters", CHARACTERS, class_of["characters"]))
    found.append(Partition("closing brackets", ("no closing bracket", "unmatched", "opened before the window",
                                                *distance_names()), _closings(opened_BT, positions, batch)))
    is_code = documents.python_bytes >= PYTHON_SHARE * documents.bytes
    found.append(Partition("code", CODE, class_of["code"]) if is_code else Partition("prose", PROSE, class_of["prose"]))
    for partition in found:
        assert ((partition.class_BT >= 0) == scored_BT).all(), partition.name
    return found


def check_text(files: TokenFiles) -> None:
    """Raises :class:`ConfigError` unless the tokens are text."""
    if files.unit != "byte" or files.meta.get("tokenizer_fingerprint") is None:
        what = "images" if files.unit != "byte" else "symbols of a generated corpus"
        raise ConfigError(f"{files.directory} has {what}, which have no classes of tokens; expected text")


def distance_names() -> list[str]:
    """The classes of distances in tokens."""
    firsts = (1, *(last + 1 for last in DISTANCES))
    return [f"{first:,} to {last:,} tokens before" for first, last in zip(firsts, DISTANCES, strict=False)] + [
        f"over {DISTANCES[-1]:,} tokens before"]


def _distance_class(distance: np.ndarray | int) -> np.ndarray:
    return np.searchsorted(DISTANCES, distance)


def _repeats(batch: Batch, n: int) -> Int[np.ndarray, "B T"]:
    """0 where a target does not complete an n-gram that was in its segment before, else 1 plus the class of the
    distance to the last time."""
    inputs_BT, targets_BT = np.asarray(batch.inputs_BT), np.asarray(batch.targets_BT)
    segments_BT = np.zeros_like(inputs_BT) if batch.segment_ids_BT is None else np.asarray(batch.segment_ids_BT)
    class_BT = np.where(targets_BT >= 0, 0, -1)
    for b, (inputs, targets, segments) in enumerate(zip(
            inputs_BT.tolist(), targets_BT.tolist(), segments_BT.tolist(), strict=True)):
        last: dict[tuple[int, ...], int] = {}
        start = 0
        for t in range(len(inputs)):
            if t and segments[t] != segments[t - 1]:
                start, last = t, {}
            if targets[t] < 0 or t + 2 - n < start:
                continue
            gram = (*inputs[t + 2 - n : t + 1], targets[t])
            if (before := last.get(gram)) is not None:
                class_BT[b, t] = 1 + _distance_class(t - before)
            last[gram] = t
    return class_BT


def _closings(opened_BT: np.ndarray, positions_BT: np.ndarray, batch: Batch) -> Int[np.ndarray, "B T"]:
    """The class of each target as a closing bracket, by where it was opened: −2 for no closing bracket, −1 for one that
    nothing opened."""
    T = positions_BT.shape[1]
    index_T = np.arange(T)
    segments_BT = np.zeros_like(positions_BT) if batch.segment_ids_BT is None else np.asarray(batch.segment_ids_BT)
    begins_BT = np.diff(segments_BT, axis=1, prepend=-2) != 0
    starts_BT = np.maximum.accumulate(np.where(begins_BT, index_T, 0), axis=1)
    # The first input of a segment is the token before its first target.
    first_BT = np.take_along_axis(positions_BT, starts_BT, axis=1) - 1
    distance_BT = positions_BT - opened_BT
    there_BT = np.where(opened_BT >= first_BT, 3 + _distance_class(distance_BT), 2)
    class_BT = np.where(opened_BT == -2, 0, np.where(opened_BT == -1, 1, there_BT))
    return np.where(np.asarray(batch.targets_BT) >= 0, class_BT, -1)


class _Document(NamedTuple):
    start: int
    """Position of its first token in the split."""
    classes: dict[str, Int[np.ndarray, " L"]]
    """The class of each of its tokens and of its separator, by partition; for brackets where they were opened."""


class _Documents:
    """The documents of a split, classed when first asked for."""

    def __init__(self, files: TokenFiles, split: str, text_of: Sequence[bytes]):
        self._files, self._split, self._text_of = files, split, text_of
        self._ends_N = files.separators(split)
        self.bytes = self.python_bytes = 0

    def number_of(self, positions: np.ndarray) -> np.ndarray:
        """The number of the document of each position; a separator belongs to the document before it."""
        return np.searchsorted(self._ends_N, positions)

    def __getitem__(self, number: int) -> _Document:
        start = 0 if number == 0 else int(self._ends_N[number - 1]) + 1
        tokens = self._files.tokens(self._split)
        stop = int(self._ends_N[number]) + 1 if number < len(self._ends_N) else tokens
        ids_L = self._files.read(self._split, start, stop)
        parts = [self._text_of[i] for i in ids_L.tolist()]
        text, ends_L = b"".join(parts), np.cumsum([len(part) for part in parts])
        starts_L = ends_L - [len(part) for part in parts]
        python = python_classes(text)
        self.bytes += len(text)
        self.python_bytes += len(text) if python is not None else 0
        if python is None:
            python = np.full(len(text), CODE.index("not Python"), np.uint8)
        characters = character_classes(text)
        first_L = _first_characters(text, starts_L, ends_L)
        is_end_L = ids_L == self._files.separator

        def at_tokens(classes: np.ndarray, names: Sequence[str]) -> np.ndarray:
            return np.where(is_end_L, names.index(END), np.append(classes, 0)[first_L])

        opened = matching_brackets(text)  # by byte; as positions of tokens:
        token_at = np.searchsorted(ends_L, np.arange(len(text)), side="right")
        byte_L = np.append(opened, -2)[first_L]
        opened_L = np.where(byte_L < 0, byte_L, start + np.append(token_at, 0)[byte_L])
        opened_L = np.where(is_end_L, -2, opened_L)
        return _Document(start, {
            "characters": at_tokens(characters, CHARACTERS), "code": at_tokens(python, CODE),
            "prose": at_tokens(prose_classes(text), PROSE), "brackets": opened_L})


def _first_characters(text: bytes, starts_L: np.ndarray, ends_L: np.ndarray) -> np.ndarray:
    """The first byte of each token that is not a space, or its last one."""
    solid = np.flatnonzero(~np.isin(np.frombuffer(text, np.uint8), list(b" \t\r\n\f\v")))
    following_L = np.append(solid, len(text))[np.searchsorted(solid, starts_L)]
    return np.where(following_L < ends_L, following_L, np.maximum(ends_L - 1, 0))


def _by_pattern(text: bytes, patterns: Sequence[tuple[str, Callable[[re.Match[bytes]], str] | str]],
                names: Sequence[str]) -> UInt8[np.ndarray, " L"]:
    """The class of each byte: that of the first pattern that matches from there on, for all bytes of the match."""
    combined = re.compile("|".join(f"(?P<p{i}>{pattern})" for i, (pattern, _) in enumerate(patterns)).encode(),
                          re.DOTALL)
    class_L = np.empty(len(text), np.uint8)
    for match in combined.finditer(text):
        name = patterns[int((match.lastgroup or "p0")[1:])][1]
        class_L[match.start() : match.end()] = names.index(name if isinstance(name, str) else name(match))
    return class_L


_SPACES = r"[ \t\f\v\r]+"
_WORD = r"[A-Za-z_\x80-\xff][A-Za-z_0-9\x80-\xff]*"


def character_classes(text: bytes) -> UInt8[np.ndarray, " L"]:
    """The class of each byte in ``CHARACTERS``. Only the first byte of a word is its start."""
    class_L = _by_pattern(text, [
        (rf"(?:(?<=\n)|\A){_SPACES}", "indentation"), (_SPACES, "space"), (r"\n", "line break"),
        (_WORD, "word continuation"), (r"[0-9]+", "number"), (r"[\[({]", "opening bracket"),
        (r"[\])}]", "closing bracket"), (r".", "other character")], CHARACTERS)
    is_word = class_L == CHARACTERS.index("word continuation")
    starts = [match.start() for match in re.finditer(_WORD.encode(), text)]
    class_L[[start for start in starts if is_word[start]]] = CHARACTERS.index("word start")
    return class_L


def prose_classes(text: bytes) -> UInt8[np.ndarray, " L"]:
    """The class of each byte in ``PROSE``."""
    def word(match: re.Match[bytes]) -> str:
        return "function word" if match.group().decode("latin-1").lower() in FUNCTION_WORDS else "content word"

    return _by_pattern(text, [(r"\s+", "whitespace"), (r"[A-Za-z\x80-\xff]+", word), (r"[0-9]+", "number"),
                              (r".", "other character")], PROSE)


def matching_brackets(text: bytes) -> Int[np.ndarray, " L"]:
    """For each byte the offset of the bracket that it closes, −1 if nothing opened it, −2 if it closes nothing.
    Brackets in strings and comments count like others."""
    opened_L = np.full(len(text), -2)
    stack: list[int] = []
    for match in re.finditer(rb"[\[\](){}]", text):
        at, byte = match.start(), text[match.start()]
        if byte not in BRACKETS:
            stack.append(at)
        elif stack and text[stack[-1]] == BRACKETS[byte]:
            opened_L[at] = stack.pop()
        else:
            opened_L[at] = -1
    return opened_L


def python_classes(text: bytes) -> UInt8[np.ndarray, " L"] | None:
    """The class of each byte in ``CODE``, by Python's own ``tokenize``; None if the text is not Python."""
    try:
        source = text.decode()
        ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return None
    lines = io.StringIO(source).readlines()
    starts = np.cumsum([0, *(len(line.encode()) for line in lines)])

    def offset(place: tuple[int, int]) -> int:
        row, column = place
        if row > len(lines):
            return len(text)
        return int(starts[row - 1]) + len(lines[row - 1][:column].encode())

    class_L = np.full(len(text), CODE.index("whitespace"), np.uint8)
    depth = begin = 0
    for token in tokens:  # doubled braces of an f-string are in none of its tokens
        kind = tokenize.tok_name[token.type]
        if kind in ("FSTRING_START", "TSTRING_START"):
            begin = offset(token.start) if depth == 0 else begin
            depth += 1
        elif kind in ("FSTRING_END", "TSTRING_END"):
            depth -= 1
            if depth == 0:
                class_L[begin : offset(token.end)] = CODE.index("string")
    for token in tokens:
        if (name := _code_class(token)) is not None:
            class_L[offset(token.start) : offset(token.end)] = CODE.index(name)
    return class_L


def _code_class(token: tokenize.TokenInfo) -> str | None:
    kind = tokenize.tok_name[token.type]
    if kind == "NAME":
        return "keyword" if keyword.iskeyword(token.string) else "identifier"
    if kind in ("STRING", "FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END", "TSTRING_START", "TSTRING_MIDDLE",
                "TSTRING_END"):
        return "string"
    return {"NUMBER": "number", "COMMENT": "comment", "OP": "operator"}.get(kind)


@functools.lru_cache(maxsize=4)
def _texts_of(files: TokenFiles) -> Sequence[bytes]:
    """The text of each token of a vocabulary; empty for special ones.

    Raises:
        DataError: the vocabulary cannot be loaded, or is another one.
    """
    encoding = tokenizers.load(files.tokenizer)
    token_files.check_fingerprint(files.directory, files.meta, tokenizers.fingerprint(encoding))
    return tokenizers.token_texts(encoding)
