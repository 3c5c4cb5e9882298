"""Write a small language model with random weights, and its tokenizer, into the folder model/.

The files are in Hugging Face's format, like those that `hf download` writes. No internet is needed.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"  # the token that ends a text
# How a conversation becomes one text: "user: ...<|end|>assistant: ...<|end|>".
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def main():
    tokenizer = Tokenizer(models.BPE())  # byte level: it can write any script
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[END], **alphabet)
    lines = Path("text.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    tokenizer.chat_template = CHAT
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.05,  # with the default, 0.02, a model this narrow hardly learns
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    print(f"model/: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
