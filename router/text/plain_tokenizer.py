"""A second tokenizer for prompts whose content holds the text of control tokens: here these have other names."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence

import tokenizers

from protos.errors import InvalidRequest
from router.text.control import Span
from router.text.stretches import Part, Stretches


def read_texts(
    backend: tokenizers.Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> Sequence[tokenizers.Encoding]:
    """Raises InvalidRequest for a text over which a pattern of the tokenizer gives up: the library panics then."""
    try:
        # The batch call finds no offsets, which is a fifth of the work, and lets go of the interpreter's lock.
        return backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    except BaseException as error:  # a panic is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidRequest(f"The model's tokenizer cannot read this text ({str(error)[:200]}): change it") from None


class PlainTokenizer:
    """Tokenizes control texts as plain text, except at given spans. Shares the model with `backend`. Thread-safe.

    Control tokens have unguessable names with the same flags, so that the text around them is read as by `backend`."""

    def __init__(self, backend: tokenizers.Tokenizer, controls: Collection[str]) -> None:
        own = tokenizers.Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (step := getattr(backend, part)) is not None:
                setattr(own, part, step)
        own.no_truncation()
        own.no_padding()
        vocabulary = backend.get_vocab(with_added_tokens=False)
        _reserve(own, vocabulary)
        self._names: dict[str, str] = {}
        self._ids: dict[int, int] = {}  # numbers that `own` does not number
        secret = secrets.token_hex(16)
        for token_id, token in sorted(backend.get_added_tokens_decoder().items()):
            name = token.content
            if token.content in controls:
                name = self._names[token.content] = f"\ufdd0{secret}{token_id}\ufdd1"
            own.add_tokens([token if name == token.content else _renamed(token, name, backend)])
            given_id = own.token_to_id(name)
            assert given_id is not None, "it was added"
            self._ids[given_id] = token_id
        self._own = own
        # A model may have them among its words, and so find them in plain text.
        self._found = {vocabulary[text]: text for text in controls if text in vocabulary}
        for unknown in (getattr(backend.model, "unk_token", None), "<unk>"):
            self._found.pop(vocabulary.get(unknown or "", -1), None)
        self.stretches = Stretches(backend, self._read_parts, controls=controls)

    def encode(self, text: str, spans: Sequence[Span] = (), *, add_special_tokens: bool = False) -> tuple[int, ...]:
        parts: list[str] = []
        at = 0
        for start, end in spans:
            parts += text[at:start], self._names[text[start:end]]
            at = end
        [encoding] = read_texts(self._own, ["".join([*parts, text[at:]])], add_special_tokens=add_special_tokens)
        added = encoding.special_tokens_mask if add_special_tokens else [0] * len(encoding.ids)
        ids: list[int] = []
        for token_id, is_added in zip(encoding.ids, added, strict=True):
            if not is_added and token_id in self._found:
                ids += self._spelled(self._found[token_id])
            else:
                ids.append(token_id if is_added else self._ids.get(token_id, token_id))
        return tuple(ids)

    def _read_parts(self, parts: Sequence[Part]) -> list[tuple[int, ...]]:
        return [self.encode(text, spans) for text, spans in parts]

    def _spelled(self, text: str) -> list[int]:
        return [token.id for char in text for token in self._own.model.tokenize(char)]


def _renamed(token: tokenizers.AddedToken, name: str, backend: tokenizers.Tokenizer) -> tokenizers.AddedToken:
    """Renames a token. Its new name is found everywhere, even where the token is not: no name may be read as text."""
    read = backend.encode(f"x{token.content}x", add_special_tokens=False).tokens
    return tokenizers.AddedToken(
        name,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and token.content in read,
        special=token.special,
    )


def _reserve(own: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> None:
    """Reserves numbers of new tokens: they count from the number of words, which in a vocabulary with gaps is another
    word's."""
    missing = max(vocabulary.values(), default=-1) + 1 - len(vocabulary)
    own.add_tokens([f"\ufdd0{secrets.token_hex(16)}\ufdd1" for _ in range(missing)])
