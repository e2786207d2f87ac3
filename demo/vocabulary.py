"""The demo model's tokenizer: a byte-level BPE trained on the corpus, and the chat form as a Jinja template."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS = "<|bos|>"
END_OF_TEXT = "<|endoftext|>"
END = "<|end|>"
SPECIAL_TOKENS = (BOS, END_OF_TEXT, END, "<|system|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 4096

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
  {{- '<|system|>Call functions as <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Functions:' }}
  {%- for tool in tools %}
    {{- '\\n' ~ tool['function'] | tojson }}
  {%- endfor %}
  {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
  {%- set role = 'system' if message['role'] == 'developer' else message['role'] %}
  {%- if role == 'tool' %}
    {{- '<|user|><tool_response>' ~ message['content'] ~ '</tool_response><|end|>' }}
  {%- elif role not in ['system', 'user', 'assistant'] %}
    {{- raise_exception('This model knows the roles system, user, assistant and tool, not ' ~ message['role']) }}
  {%- else %}
    {{- '<|' ~ role ~ '|>' ~ (message['content'] or '') | trim }}
    {%- for call in message['tool_calls'] or [] %}
      {{- '<tool_call>{"name": "' ~ call['function']['name'] ~ '", "arguments": ' }}
      {{- call['function']['arguments'] | tojson ~ '}</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|assistant|>' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a BPE of `VOCAB_SIZE` tokens; every byte is in its alphabet, so every text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def tokenizer_config(context: int) -> dict[str, object]:
    """The contents of `tokenizer_config.json` for a model that reads `context` tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (BOS, END_OF_TEXT)],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def render_dialogue(turns: Sequence[tuple[str, str]]) -> str:
    """A finished conversation of (role, content) turns: what the template renders, closed by the end of text."""
    return BOS + "".join(f"<|{role}|>{content.strip()}{END}" for role, content in turns) + END_OF_TEXT


def open_dialogue(question: str) -> str:
    """A conversation whose next word is the model's: what the template renders with `add_generation_prompt`."""
    return f"{BOS}<|user|>{question.strip()}{END}<|assistant|>"
