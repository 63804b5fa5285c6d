"""Small tokenizers with chat templates, made on the spot: no model has to be fetched."""

from __future__ import annotations

import base64
import json
from pathlib import Path

SENTENCES = [
    "The quick brown fox jumps over the lazy dog while the sun sets behind the hills.",
    "Question and answer, again and again: what is a hidden state, and who wrote this token?",
    "Sure! Here is the answer that you asked for. It has two parts, one short and one long.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Like Qwen3: the last turn gets a <think> block, earlier ones lose theirs.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% set answer = m['content'].split('</think>')[-1].lstrip('\\n') %}"
    "{% if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ answer }}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Like DeepSeek-R1: the generation prompt opens a block that the rendering of a turn does not have.
OPENS_THINK = CHATML.replace("{{ '<|im_start|>assistant\\n' }}{% endif %}", "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}")
# Renders earlier answers shortened: nothing that it renders for a turn is in the whole.
SHORTENS = CHATML.replace("+ m['content'] +", "+ (m['content'] if loop.last else m['content'][:3] ~ m['content'][-1]) +")
REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML


def make_tokenizer(folder: Path, template: str | None = CHATML) -> str:
    """A byte-level BPE of about 400 tokens in ``folder``; any text can be encoded. The folder's name is returned."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_slow_tokenizer(folder: Path, template: str = CHATML) -> str:
    """A tokenizer without offsets (bytes, in Python), as Kimi-K2's is."""
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


TIKTOKEN = """
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer


class MadeTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kw):
        ranks = load_tiktoken_bpe(vocab_file)
        self.encoding = tiktoken.Encoding(name="made", pat_str=r"\\S+|\\s+", mergeable_ranks=ranks, special_tokens={})
        self.names = {i: token.decode("latin-1") for token, i in ranks.items()}
        self.ids = {name: i for i, name in self.names.items()}
        super().__init__(**kw)

    @property
    def vocab_size(self):
        return len(self.names)

    def get_vocab(self):
        return {**self.ids, **self.added_tokens_encoder}

    def _tokenize(self, text, **kw):
        return [self.names[i] for i in self.encoding.encode_ordinary(text)]

    def _convert_token_to_id(self, token):
        return self.ids[token]

    def _convert_id_to_token(self, index):
        return self.names[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).encode("latin-1").decode("utf-8", "replace")
"""


def make_tiktoken_tokenizer(folder: Path, template: str = CHATML) -> str:
    """One with code of its own over tiktoken, as Kimi-K2's: its package has to be where rows are ingested."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenization_made.py").write_text(TIKTOKEN)
    tokens = [bytes([i]) for i in range(256)] + [b"an", b"er", b" t"]
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "tokenizer_class": "MadeTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_made.MadeTokenizer", None]},
        "added_tokens_decoder": {
            str(len(tokens) + i): {"content": name, **special} for i, name in enumerate(("<|im_start|>", "<|im_end|>"))
        },
        "eos_token": "<|im_end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)
