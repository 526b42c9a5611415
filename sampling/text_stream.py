"""Tokens of a sample to text while they are drawn: whole characters only, and up to a stop string."""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tiktoken


class TextStream:
    """The text of one sample, as far as it is certain; bytes that make no character are U+FFFD.

    A stop string ends the sample, which is the text before it, wherever the borders of tokens are. Text that may be the
    beginning of one is held back until it is known. Of several stop strings the one that is whole first counts.

    Args:
        encoding: the tokenizer. Its end-of-text ends the sample too.
        stop: stop strings, none of them empty.
    """

    def __init__(self, encoding: "tiktoken.Encoding", stop: Sequence[bytes] = ()):
        self._encoding, self._stop = encoding, stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""
        self.tokens = 0
        """Tokens seen, but for end-of-text."""
        self.kept: list[int] = []
        """Tokens whose text the sample has whole."""
        self.rest = b""
        """Text of the sample after these: where a stop string begins inside a token."""
        self.stopped = self.ended = False
        """Whether there was a stop string; whether there was one, or end-of-text."""

    def feed(self, tokens_T: Sequence[int] | np.ndarray) -> str:
        """The text that these tokens make certain; nothing once the sample has ended."""
        certain = b""
        for token in map(int, tokens_T):
            if self.ended or token == self._encoding.eot_token:
                self.ended = True
                break
            self.tokens += 1
            self.kept.append(token)
            self._held += self._bytes(token)
            found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
            if found:
                self.stopped = self.ended = True
                self._drop(len(self._held) - min(found)[1])
                certain += self._held
                self._held = b""
            else:
                certain += self._release()
        return self._decoder.decode(certain)

    def close(self) -> str:
        """What is left: text held back, and U+FFFD where the sample stopped inside a character."""
        held, self._held = self._held, b""
        return self._decoder.decode(held, final=True)

    def _release(self) -> bytes:
        """What cannot be the beginning of a stop string."""
        begun = max((size for stop in self._stop for size in range(1, len(stop)) if self._held.endswith(stop[:size])),
                    default=0)
        certain = self._held[:len(self._held) - begun]
        self._held = self._held[len(certain):]
        return certain

    def _drop(self, size: int) -> None:
        """Takes so many bytes off the end of the sample."""
        self._held = self._held[:len(self._held) - size]
        while size > 0:
            last = self._bytes(self.kept.pop())
            self.rest = last[:max(0, len(last) - size)]
            size -= len(last)

    def _bytes(self, token: int) -> bytes:
        try:
            return self._encoding.decode_single_token_bytes(token)
        except KeyError:  # vocabularies have gaps, and a model's may be rounded up
            return "\N{REPLACEMENT CHARACTER}".encode()
