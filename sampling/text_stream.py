"""Streaming conversion of tokens to text: complete characters only, up to a stop string."""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tiktoken


class TextStream:
    """The text of one sample; undecodable bytes are U+FFFD.

    The sample ends before the first complete stop string, regardless of token boundaries. Text that may begin a stop
    string is held back.

    Args:
        encoding: the tokenizer. Its end-of-text also ends the sample.
        stop: non-empty stop strings.
    """

    def __init__(self, encoding: "tiktoken.Encoding", stop: Sequence[bytes] = ()):
        self._encoding, self._stop = encoding, stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""
        self.tokens = 0
        """Number of tokens, without end-of-text."""
        self.whole: list[int] = []
        """Tokens whose whole text is in the sample."""
        self.rest = b""
        """Text of the sample after ``whole``, if a stop string begins inside a token."""
        self.stopped = self.ended = False
        """Whether a stop string, or a stop string or end-of-text, ended the sample."""

    def feed(self, tokens_T: Sequence[int] | np.ndarray) -> str:
        """Text that is complete with these tokens; empty after the end of the sample."""
        certain = b""
        for token in map(int, tokens_T):
            if self.ended or token == self._encoding.eot_token:
                self.ended = True
                break
            self.tokens += 1
            self.whole.append(token)
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
        """The remaining text: what was held back, and U+FFFD for an incomplete character."""
        held, self._held = self._held, b""
        return self._decoder.decode(held, final=True)

    def _release(self) -> bytes:
        """Text that cannot begin a stop string."""
        begun = max((size for stop in self._stop for size in range(1, len(stop)) if self._held.endswith(stop[:size])),
                    default=0)
        certain = self._held[:len(self._held) - begun]
        self._held = self._held[len(certain):]
        return certain

    def _drop(self, size: int) -> None:
        """Removes bytes from the end of the sample."""
        self._held = self._held[:len(self._held) - size]
        while size > 0:
            last = self._bytes(self.whole.pop())
            self.rest = last[:max(0, len(last) - size)]
            size -= len(last)

    def _bytes(self, token: int) -> bytes:
        try:
            return self._encoding.decode_single_token_bytes(token)
        except KeyError:  # vocabularies have gaps, and a model's vocabulary may be padded
            return "\N{REPLACEMENT CHARACTER}".encode()
