"""Tokenizers made from a GGUF's metadata give the ids and texts of the tokenizer.json that the file was made from."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.gguf.text_splits import SPLITS
from protos.model_files.opening import open_model
from router.text.chat_template import ChatTemplate
from router.text.detokenizer import Detokenizer
from router.text.model_card import ModelCard
from router.text.tokenizer import Tokenizer
from tests.gguf_models import tokenizer_metadata
from tests.gguf_writer import Stored, write_gguf
from workers.models.model_config import read_config

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
ISOLATED: dict[str, tuple[str, ...]] = {
    "llama-bpe": (
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL,
    ),
    "qwen2": (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL,),
    "tekken": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + TAIL,
    ),
    "gpt-4o": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + TAIL,
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        + TAIL,
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"),
}  # fmt: skip
"""The patterns of the models' own tokenizer.json."""

CORPUS = [
    "The quick brown fox doesn't jump; it's lazy. They'll say WE'VE 12345 reasons, don't we?",
    "def main(argv: list[str]) -> int:\n    if not argv:\n\t\treturn 0  # nothing\n\n\n    return len(argv) % 1_000\n",
    "Größe naïve café — „Zitat“ … Ελληνικά κείμενο, Русский текст, עברית, العربية ١٢٣",
    "日本語のテキスト、漢字とカナ。한국어 문장입니다. 中文句子，标点符号！",
    "emoji 🙂👩‍👩‍👧 flags 🇩🇪, math ∑∫≠ ½ ², tabs\t\tand   spaces   \r\n\r\n end  ",
    " leading space", "trailing space ", "   ", "\n", "", "a", "'s'S'LL I'M", "e\u0301 vs é", "HTTP2XX camelCase",
    "http://example.com/path?x=1&y=2#frag // comment */ /* \\ \"quoted\" 'single'", "0" * 17, "x" * 70, "\u3000全角",
    "control \x00\x01\x7f and \u200b zero width", "ﬁ ligature Ａ fullwidth", "<|end|> <|user|> <tool> text",
]  # fmt: skip
SPECIAL, TEMPLATE = (
    ("<|bos|>", "<|end|>", "<|user|>"),
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
)


@cache
def byte_level(pre: str) -> str:
    """A tokenizer.json as it would have been published, trained on the corpus."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        backend.pre_tokenizer = whole
    elif pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    else:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in ISOLATED[pre]]
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken("<tool>", normalized=False, special=False)])
    if pre in ("llama-bpe", "tekken"):
        bos = backend.token_to_id("<|bos|>")
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", bos)]
        )
    return backend.to_str()


def loaded(tmp_path: Path, metadata: Mapping[str, Any], **more: Any) -> Tokenizer:
    ids = {"general.architecture": "llama", "tokenizer.chat_template": TEMPLATE}
    return Tokenizer.load(open_model(write_gguf(tmp_path / "m.gguf", {**ids, **metadata, **more}, {})))


def from_gguf(pre: str, tmp_path: Path) -> Tokenizer:
    state = json.loads(byte_level(pre))
    ids = {token["content"]: token["id"] for token in state["added_tokens"]}
    metadata = tokenizer_metadata(state, pre=pre, vocab_size=720)
    named = {"bos": ids["<|bos|>"], "eos": ids["<|end|>"]}
    return loaded(tmp_path, metadata, **{f"tokenizer.ggml.{role}_token_id": value for role, value in named.items()})


def assert_alike(ours: Tokenizer, theirs: Tokenizer, texts: Sequence[str] = CORPUS) -> None:
    for text in texts:
        for adds in (False, True):
            ids = ours._encode([text], adds)
            assert ids == theirs._encode([text], adds), text
        assert ours.decode(ids[0]) == theirs.decode(ids[0])
        assert streamed(ours, ids[0]) == streamed(theirs, ids[0])
    assert ours.vocabulary.special == theirs.vocabulary.special
    assert ours.added_tokens == theirs.added_tokens
    assert ours.vocabulary.token_bytes[: len(theirs.vocabulary.token_bytes)] == theirs.vocabulary.token_bytes


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.vocabulary, at_start=True)
    return [detokenizer.feed(token_id) for token_id in ids]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", *ISOLATED])
def test_byte_level_ids_and_texts_are_the_originals(pre: str, tmp_path: Path) -> None:
    ours = from_gguf(pre, tmp_path)
    assert_alike(ours, Tokenizer(tokenizers.Tokenizer.from_str(byte_level(pre))))
    assert ours.named_tokens == {"bos_token": "<|bos|>", "eos_token": "<|end|>"}


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
@settings(max_examples=60)
@given(text=st.text(max_size=60))
def test_any_text_has_the_ids_of_the_original(pre: str, text: str, tmp_path: Path) -> None:
    theirs = Tokenizer(tokenizers.Tokenizer.from_str(byte_level(pre)))
    assert from_gguf(pre, tmp_path)._encode([text], True) == theirs._encode([text], True)


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_pre_keeps_all_of_a_text(pre: str, tmp_path: Path) -> None:
    metadata = tokenizer_metadata(json.loads(byte_level("gpt-2")), pre=pre, vocab_size=720)
    tokenizer = loaded(tmp_path, metadata)
    for text in CORPUS:
        if not SPLITS[pre].nfc:
            [ids] = tokenizer._encode([text], False)
            assert tokenizer.decode(ids) == text


# -- SentencePiece ----------------------------------------------------------------------------------------------------


@cache
def pieces() -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Texts and scores as SentencePiece trains them: control tokens, bytes, then words, the best score first."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, limit_alphabet=90)
    backend.train_from_iterator(CORPUS[:5], trainer)
    words = sorted(backend.get_vocab().items(), key=lambda item: (len(item[0]) == 1, item[1]))
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(word for word, _ in words)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))]
    return tuple(texts), tuple(scores)


def sentencepiece(tmp_path: Path, **more: Any) -> Tokenizer:
    texts, scores = pieces()
    added = [{"id": i, "content": texts[i], "special": True} for i in range(3)]
    state = {"model": {"vocab": {text: i for i, text in enumerate(texts)}}, "added_tokens": added}
    metadata = tokenizer_metadata(state, pre="", vocab_size=len(texts), scores=scores)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return loaded(tmp_path, metadata, **{f"tokenizer.ggml.{key}": value for key, value in (ids | more).items()})


def joined_by_score(text: str, *, prefix: bool = True) -> tuple[int, ...]:
    """SentencePiece's algorithm: of all neighbours that are a piece together, join those of the best score, the
    leftmost first; what is no piece becomes bytes."""
    texts, scores = pieces()
    ids = {piece: i for i, piece in enumerate(texts)}
    symbols: list[str | None] = list((" " + text if prefix and text else text).replace(" ", "▁"))
    after = {i: i + 1 for i in range(len(symbols))}
    queue: list[tuple[float, int, str, str]] = []

    def push(left: int) -> None:
        right = after[left]
        if right < len(symbols):
            first, two = symbols[left], symbols[right]
            assert first is not None
            assert two is not None
            if first + two in ids:
                heapq.heappush(queue, (-scores[ids[first + two]], left, first, two))

    before: dict[int, int] = {i + 1: i for i in range(len(symbols))}
    for i in range(len(symbols)):
        push(i)
    while queue:
        _, left, first, two = heapq.heappop(queue)
        right = after.get(left, len(symbols))
        if right >= len(symbols) or symbols[left] != first or symbols[right] != two:
            continue
        symbols[left], symbols[right] = first + two, None
        after[left] = after[right]
        before[after[left]] = left
        push(left)
        if left in before:
            push(before[left])
    merged: list[int] = []
    for symbol in symbols:
        if symbol is not None:
            spelled = [3 + byte for byte in symbol.encode()]
            merged += [ids[symbol]] if symbol in ids else spelled
    return tuple(merged)


def test_sentencepiece_ids_follow_its_algorithm(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    for text in CORPUS:
        [ids] = tokenizer._encode([text], False)
        assert ids == joined_by_score(text), text
        assert tokenizer.decode(ids) == text
        assert "".join(streamed(tokenizer, ids)) == text
        assert tokenizer._encode([text], True) == [(1, *ids)], "add_bos_token is true where it is absent"


@settings(max_examples=100)
@given(text=st.text(alphabet="abdehilmnorstuw .,'▁\né漢🙂", max_size=40))
def test_any_text_has_sentencepieces_ids(text: str, tmp_path: Path) -> None:
    assert sentencepiece(tmp_path)._encode([text], False) == [joined_by_score(text)]


def test_metadata_flags_decide_surrounding_tokens(tmp_path: Path) -> None:
    plain = sentencepiece(tmp_path, add_bos_token=False, add_space_prefix=False)
    [ids] = plain._encode(["the text"], True)
    assert ids == joined_by_score("the text", prefix=False)
    assert plain.decode(ids) == "the text"
    both = sentencepiece(tmp_path, add_eos_token=True)
    assert both._encode(["the"], True) == [(1, *joined_by_score("the"), 2)]


# -- what else is in the metadata --------------------------------------------------------------------------------------


def test_ends_templates_and_settings_are_found(tmp_path: Path) -> None:
    state = json.loads(byte_level("gpt-2"))
    ids = {token["content"]: token["id"] for token in state["added_tokens"]}
    metadata = tokenizer_metadata(state, pre="gpt-2", vocab_size=720) | {
        "general.architecture": "llama",
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "tokenizer.ggml.eos_token_id": ids["<|user|>"],
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.chat_template.tool_use": "{% for tool in tools %}{{ tool }}{% endfor %}",
        "tokenizer.chat_templates": ["tool_use"],
    }
    files = open_model(write_gguf(tmp_path / "m.gguf", metadata, {}))
    generation = files.json("generation_config.json")
    assert generation == {"eos_token_id": [ids["<|user|>"], ids["<|end|>"]], "temperature": 0.5, "top_k": 20}
    template = ChatTemplate.load(files, {"bos_token": "<|bos|>"})
    assert template is not None
    assert template.shows_tools
    assert files.text("chat_template.jinja") is None


def test_an_embedded_original_tokenizer_is_used(tmp_path: Path) -> None:
    metadata = tokenizer_metadata(json.loads(byte_level("gpt-2")), pre="default", vocab_size=720)
    ours = loaded(tmp_path, metadata, **{"tokenizer.huggingface.json": byte_level("qwen2")})
    assert_alike(ours, Tokenizer(tokenizers.Tokenizer.from_str(byte_level("qwen2"))))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model": "bert"}, UnsupportedModel, "model is 'bert', which is not served: gpt2"),
        ({"pre": "jais-9"}, UnsupportedModel, r"pre is 'jais-9', which is not served: known are llama-bpe.*Hugg"),
        ({"tokens": 5}, BadCheckpoint, "'tokens' is 5: it must be an array of string values"),
        ({"tokens": [1, 2]}, BadCheckpoint, "'tokens' is an array of 2 int32 values: it must be an array of string"),
        ({"token_type": [1, 1]}, BadCheckpoint, "'token_type' is an array of 2 int32.*one for each of 720 tokens"),
        ({"tokens": ["a", "b", "a"]}, BadCheckpoint, "tokens has 'a' twice"),
        ({"merges": ["a b", "zz qqq"]}, BadCheckpoint, "'zz' [+] 'qqq', which are no tokens"),
        ({"model": "llama"}, BadCheckpoint, "'scores' is None: it must be an array of float32"),
    ],
)  # fmt: skip
def test_a_vocabulary_that_contradicts_itself_is_named(
    changes: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    metadata = tokenizer_metadata(json.loads(byte_level("gpt-2")), pre="gpt-2", vocab_size=720)
    with pytest.raises(error, match=says):
        loaded(tmp_path, metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})


VALUES = st.one_of(
    st.integers(-(2**31), 2**31 - 1), st.floats(width=32), st.booleans(), st.text(max_size=8),
    st.lists(st.text(max_size=4), min_size=1, max_size=8), st.lists(st.integers(-3, 9), max_size=8),
)  # fmt: skip
KEYS = (
    "general.architecture", "general.type", "llama.block_count", "llama.attention.head_count", "llama.context_length",
    "llama.attention.head_count_kv", "llama.attention.key_length", "llama.rope.freq_base", "llama.rope.scaling.type",
    "llama.rope.scaling.factor", "llama.attention.sliding_window", "llama.expert_count", "general.sampling.temp",
    "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges", "tokenizer.ggml.pre", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.add_bos_token", "tokenizer.chat_template", "tokenizer.huggingface.json",
)  # fmt: skip


@settings(max_examples=300)
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6), is_sentencepiece=st.booleans())
def test_no_made_up_metadata_does_more_than_raise(
    changes: dict[str, Any], is_sentencepiece: bool, tmp_path: Path
) -> None:
    texts, scores = ["<unk>", "a", "b", "ab", "</s>"], [0.0, -1.0, -2.0, -0.5, 0.0]
    own = {"block_count": 1, "attention.head_count": 2, "context_length": 64, "embedding_length": 64,
           "feed_forward_length": 64, "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        **{f"llama.{key}": value for key, value in own.items()},
    }
    metadata |= {
        "tokenizer.ggml.model": "llama" if is_sentencepiece else "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": ("float32", scores),
        "tokenizer.ggml.token_type": ("int32", [2, 1, 1, 1, 3]),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 4,
    }
    tensors = {"token_embd.weight": Stored((8, 64), "F32", b"\0" * 2048)}
    path = write_gguf(tmp_path / "m.gguf", metadata | changes, tensors)
    with suppress(BadCheckpoint, UnsupportedModel):
        read_config(path)
    with suppress(BadCheckpoint, UnsupportedModel):
        files = open_model(path)
        tokenizer = Tokenizer.load(files)
        ModelCard.load(files, "m")
        ChatTemplate.load(files, tokenizer.named_tokens, tokenizer.added_tokens)
