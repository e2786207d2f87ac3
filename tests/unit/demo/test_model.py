"""The checkpoint that ships: it loads in transformers, chats by its template, and is as good as its card says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from demo import held_out
from demo.measure import Loss, answer, loss_of
from demo.vocabulary import open_dialogue, render_dialogue

MODEL = Path(__file__).parents[3] / "demo" / "model"
CPU = torch.device("cpu")


class Oracle:
    """The shipped weights as transformers runs them in float32."""

    def __init__(self) -> None:
        self._model: torch.nn.Module = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    def __call__(self, ids_1T: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=ids_1T, use_cache=False).logits
        return logits


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def chat_tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MODEL)
    return loaded


def test_the_folder_is_complete_and_small() -> None:
    names = {path.name for path in MODEL.iterdir()}
    assert names == {
        "README.md", "config.json", "generation_config.json", "held_out.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert (MODEL / "model.safetensors").stat().st_size <= 16_000_000


def test_the_weights_are_bfloat16_of_the_size_promised() -> None:
    with safe_open(MODEL / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118  # it is no mapping
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert 4_000_000 <= sum(tensor.numel() for tensor in tensors) <= 8_000_000


def test_generation_ends_at_the_end_of_a_turn_and_of_a_text(tokenizer: Tokenizer) -> None:
    stops = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|end|>")]
    assert json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"] == stops
    assert json.loads((MODEL / "config.json").read_text())["eos_token_id"] == stops


def test_a_plain_prompt_is_opened_by_the_beginning_of_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("import os").tokens[0] == "<|bos|>"


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    alphabet = ByteLevel.alphabet()
    assert len(alphabet) == 256
    assert all(tokenizer.token_to_id(symbol) is not None for symbol in alphabet)


@given(text=st.text(max_size=200))
def test_every_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["naïve café", "日本語", "🙂‍↕️", "\t if  x:\r\n\n", "\x00\x7f\u0085\ufffd", "<|end|>"])
def test_an_awkward_text_survives_the_round_trip_in_transformers(
    chat_tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    assert chat_tokenizer.decode(chat_tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_template_renders_the_training_format(chat_tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [("system", "Answer briefly."), ("user", " What does `len` do? "), ("assistant", "It counts.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = chat_tokenizer.apply_chat_template(messages, tokenize=False)
    assert f"{rendered}<|endoftext|>" == render_dialogue(turns)
    asked = chat_tokenizer.apply_chat_template(messages[1:2], tokenize=False, add_generation_prompt=True)
    assert asked == open_dialogue("What does `len` do?")


def test_the_template_reads_developer_as_system(
    chat_tokenizer: PreTrainedTokenizerBase,
) -> None:
    rendered = chat_tokenizer.apply_chat_template([{"role": "developer", "content": "Be kind."}], tokenize=False)
    assert rendered == "<|bos|><|system|>Be kind.<|end|>"
    with pytest.raises(Exception, match="not wizard"):
        chat_tokenizer.apply_chat_template([{"role": "wizard", "content": "Abracadabra"}], tokenize=False)


def card_loss(part: str) -> Loss:
    """The loss that the model card claims for one part of the held-out sample."""
    match = re.search(rf"^\| {part} \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|$", (MODEL / "README.md").read_text(), re.M)
    assert match, f"the card has no line for {part}"
    nats, bits, tokens = match.groups()
    return Loss(nats=float(nats), bits_per_byte=float(bits), num_tokens=int(tokens.replace(",", "")))


@pytest.mark.parametrize("part", ["source", "chat"])
def test_the_held_out_loss_equals_the_cards(part: str, oracle: Oracle, tokenizer: Tokenizer) -> None:
    texts = getattr(held_out.load(MODEL), part)
    measured, claimed = loss_of(oracle, tokenizer, texts, CPU), card_loss(part)
    assert measured.num_tokens == claimed.num_tokens
    assert measured.nats == pytest.approx(claimed.nats, rel=2e-3)
    assert measured.bits_per_byte == pytest.approx(claimed.bits_per_byte, rel=2e-3)


def test_long_text_is_not_harder_than_short_text(oracle: Oracle, tokenizer: Tokenizer) -> None:
    """The second half of a full context is predicted at least as well as the first: positions up to 2,047 work."""
    text = "".join(passage.removeprefix("<|bos|>") for passage in held_out.load(MODEL).source[:8])
    ids_1T = torch.tensor([tokenizer.encode(text).ids[:2048]])
    assert ids_1T.shape[1] == 2048
    with torch.no_grad():
        nats_T = torch.nn.functional.cross_entropy(oracle(ids_1T)[0, :-1], ids_1T[0, 1:], reduction="none")
    assert nats_T[1024:].mean() < nats_T[:1024].mean() + 0.5


def test_it_explains_os_path_join(oracle: Oracle, tokenizer: Tokenizer) -> None:
    said = answer(oracle, tokenizer, "What does `os.path.join` do?", CPU, max_tokens=24)
    assert said.startswith("Join two or more pathname components")
