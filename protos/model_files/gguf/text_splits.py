"""How each `tokenizer.ggml.pre` splits text before byte-level BPE: the patterns of the original tokenizers, in the
order in which they are applied. Names and patterns: llama.cpp, src/llama-vocab.cpp; the models' own tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from protos.model_files.tokenizers.byte_level import KIMI


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Each pattern isolates its matches in the pieces that the patterns before it left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is in the vocabulary is one token
    adds_bos: bool = False  # where `tokenizer.ggml.add_bos_token` is absent
    nfc: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴ"
    "ῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)

_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHES}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SLASHES}"
)
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

_SPLITS: tuple[tuple[str, Split], ...] = (
    ("llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2", Split(
        patterns=(_LLAMA3,), ignore_merges=True, adds_bos=True)),
    ("dbrx smaug-bpe glm4 chatglm-bpe", Split(patterns=(_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez", Split(patterns=(_QWEN2,), nfc=True)),
    ("stablelm2 hunyuan solar-open grok-2", Split(patterns=(_QWEN2,))),
    ("tekken", Split(patterns=(_TEKKEN,), ignore_merges=True, adds_bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2", Split(patterns=(_GPT4O,))),
    ("gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4", Split(patterns=(_GPT2,))),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", Split(patterns=(r"\p{N}", _GPT2))),
    ("deepseek-llm", Split(patterns=(
        r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+", r"\p{N}+"))),
    ("deepseek-coder", Split(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm", Split(patterns=(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))),
    ("kimi-k2", Split(patterns=(KIMI,), ignore_merges=True)),
    ("falcon", Split(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("seed-coder", Split(patterns=(_SEED,))),
    ("bailingmoe bailingmoe2", Split(patterns=(_BAILING,))),
    ("minicpm5", Split(patterns=(
        r"\p{N}{1,3}", rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+|{_REST}"), ignore_merges=True)),
    ("default", Split(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
)  # fmt: skip


def _by_name() -> Iterator[tuple[str, Split]]:
    for names, split in _SPLITS:
        for name in names.split():
            yield name, split


SPLITS: Mapping[str, Split] = dict(_by_name())
