"""One sequence's tokens to text as they come: characters appear when they are whole and never change afterwards."""

from __future__ import annotations

import codecs

from router.text.vocabulary import Vocabulary

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """`num_chars` of text were given out so far. A character cut in two by the end of the answer is left out."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special_tokens: bool = True,
        at_start: bool = False,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        """`at_start`: the tokens begin a text (a prompt). `visible` special tokens are not skipped."""
        self._vocabulary = vocabulary
        self._hidden = vocabulary.special if skip_special_tokens else frozenset[int]()
        if visible:
            self._hidden -= visible
        self._decoder = _utf8("replace")
        self._leading_space = vocabulary.leading_space if at_start else 0
        self._unfinished = False
        self.num_chars = 0

    @property
    def is_clear(self) -> bool:
        return not (self._unfinished or self._leading_space)

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        text = self._decoder.decode(self._vocabulary.bytes_of(token_id))
        self._unfinished = bool(self._decoder.getstate()[0])
        while self._leading_space and text:
            if text[0] != " ":
                self._leading_space = 0
                break
            text, self._leading_space = text[1:], self._leading_space - 1
        self.num_chars += len(text)
        return text
