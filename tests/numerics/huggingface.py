"""Models of transformers, as that library writes them, tiny and untrained: nothing is downloaded."""

from typing import Any

import torch
from torch import nn

WIDTH, HEADS, VOCABULARY, LENGTH = 32, 4, 64, 16

NAMES = ("LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM")


class Logits(nn.Module):
    """A language model that returns nothing but its logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.inner(input_ids=tokens).logits


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    """(model, data) of a class of transformers, the same on every worker."""
    import transformers

    torch.manual_seed(3)
    model = getattr(transformers, name)(make_config(name))
    return Logits(model), torch.randint(0, VOCABULARY, (64, 9))


def make_config(name: str) -> Any:
    import transformers

    if name == "GPT2LMHeadModel":
        return transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=HEADS
        )
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": HEADS, "max_position_embeddings": LENGTH}
    if name == "BertForMaskedLM":
        return transformers.BertConfig(**sizes)
    return transformers.LlamaConfig(**sizes, num_key_value_heads=HEADS // 2)
