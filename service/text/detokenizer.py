"""Turn one sequence's token ids into text while they arrive.

Not the vocabulary (`Tokenizer` owns the table of bytes per token) and not the wire. A push costs one join and one UTF-8 pass over
the new bytes; nothing is decoded twice.
Invariant: the deltas, concatenated, are the text of prompt + output minus the text of the prompt, however the ids were cut into
pushes; each delta is whole characters; no id sequence raises.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.text.stop_strings import StopScanner, StopStrings
from service.text.surrogates import replace_lone_surrogates

if TYPE_CHECKING:
    from service.text.tokenizer import Tokenizer

_MAX_CHARACTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push added. `stopped_by`: the stop string that ended the text. `num_ids`: ids consumed, up to the one that stopped."""

    text: str
    stopped_by: str | None
    num_ids: int


class TextStream:
    """The text of one sequence.

    `prompt_ids` decide whether a SentencePiece leading space belongs to the text, and may end inside a character that the output
    completes. With `include_stop` the text ends after the stop string instead of before it. After a stop, pushes add nothing.
    """

    __slots__ = ("_at_start", "_include_stop", "_scanner", "_table", "_tail")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
    ) -> None:
        self._table = tokenizer.token_bytes_table(skip_special_tokens=skip_special_tokens)
        stops = StopStrings(tuple(replace_lone_surrogates(text) for text in stop)) if stop else None
        self._scanner = StopScanner(stops) if stops is not None else None
        self._include_stop = include_stop
        last = self._last_bytes(prompt_ids)
        self._at_start = tokenizer.strips_leading_space and not last
        self._tail = last[_complete_length(last) :]

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._scanner.matched if self._scanner is not None else None

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Take the next token ids, ids outside the vocabulary included (they have no text)."""
        scanner = self._scanner
        if scanner is None:
            return TextDelta(self._decode(ids), None, len(ids))
        text = ""
        num_ids = 0
        for index in ids:
            if scanner.is_done():
                break
            text += self._scan(scanner, self._decode((index,)))
            num_ids += 1
        return TextDelta(text, scanner.matched, num_ids)

    def finish(self) -> str:
        """Return the rest: text held back for a stop string, and one U+FFFD if the ids ended inside a character.

        `stopped_by` may be set by this call: when a stop string was complete but a longer one, started earlier, was still open.
        """
        tail, self._tail = self._tail.decode("utf-8", "replace"), b""
        scanner = self._scanner
        if scanner is None:
            return tail
        if scanner.is_done():
            return ""
        text = self._scan(scanner, tail)
        if scanner.is_done():
            return text
        return text + scanner.finish() + self._included(scanner)

    def _scan(self, scanner: StopScanner, new: str) -> str:
        if not new:
            return ""
        return scanner.feed(new) + self._included(scanner)

    def _included(self, scanner: StopScanner) -> str:
        return scanner.matched if scanner.matched is not None and self._include_stop else ""

    def _decode(self, ids: Sequence[int]) -> str:
        table = self._table
        size = len(table)
        data = self._tail + b"".join([table[index] for index in ids if 0 <= index < size])
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        if data.isascii():
            self._tail = b""
            return data.decode("ascii")
        # "replace" without `final` keeps an unfinished character back and replaces what can never become one.
        text, consumed = codecs.utf_8_decode(data, "replace", False)
        self._tail = data[consumed:]
        return text

    def _last_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the last bytes of the ids' text, enough to see an unfinished character; empty only if the whole text is."""
        table, size = self._table, len(self._table)
        data = b""
        for index in reversed(ids):
            if 0 <= index < size:
                data = table[index] + data
            if len(data) >= _MAX_CHARACTER_BYTES:
                break
        return data


def _complete_length(data: bytes) -> int:
    """Return how many bytes of `data` remain when an unfinished character at its end is left out.

    A lead byte is never part of another character, so looking at the end is enough.
    """
    for back in range(1, min(_MAX_CHARACTER_BYTES, len(data) + 1)):
        if data[-back] >= 0xC0:
            _, consumed = codecs.utf_8_decode(data[-back:], "replace", False)
            return len(data) - back + consumed
    return len(data)
