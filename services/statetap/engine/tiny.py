"""A tiny Llama with a tokenizer of its own, for the demo and the tests: ``python -m statetap.engine.tiny FOLDER``.

6 blocks, hidden 64, random weights from a fixed seed. The tokenizer is a byte-level BPE (every text has tokens) with a ChatML
template that marks assistant turns by ``{% generation %}``. Both are the same at every call.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

VOCAB = 1024
SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# What the merges are learnt from: ordinary English, so that a token is about three characters.
CORPUS = """
The model reads the whole prompt at once and keeps a state for every token in it. We ask for the states of some layers and put
them into files, because a smaller model will learn from them what the large one would have said next. Please explain how this
works, and give an example. Of course! Let us start with the first step: take the list of messages, write each one with its role,
and turn the text into numbers. What should I cook for dinner tonight if there are only eggs, rice and some vegetables? You could
make fried rice: heat the oil, add the vegetables, then the rice and at last the eggs. In the year when the war ended, people came
back to their towns and began to build houses, roads and schools again. A function that calls itself is called recursive; there
must be a case in which it returns without another call. The answer is that both sides of the equation are equal when x is three.
Water boils at a lower temperature in the mountains since the pressure of the air is lower there. Thank you, that was helpful.
Can you write it in Python? Sure, here is the code: def main(): for line in open(path): print(line.strip()) return None
"""


def make_tokenizer(folder: Path) -> None:
    """Write tokenizer files with a chat template to ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[4],
        chat_template=TEMPLATE,
        model_max_length=8192,
    )
    fast.save_pretrained(folder)


def make_model(folder: Path, *, seed: int = 0) -> None:
    """Write config and fp32 weights to ``folder``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=VOCAB,
        max_position_embeddings=8192,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=4,
    )
    model = LlamaForCausalLM(config).eval()  # fp32 by default
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones would hide a norm that is left out or applied twice
                parameter.normal_(1.0, 0.2)
    model.save_pretrained(folder)


def make_tiny(folder: Path) -> Path:
    """The model folder, made unless it is there; whole or absent."""
    if not folder.is_dir():
        part = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make_tokenizer(part)
        make_model(part)
        part.rename(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(make_tiny(parser.parse_args().folder))
