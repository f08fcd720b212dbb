"""Generation with a cache, against the weights of one pass over all tokens that were generated."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
import xarray as xr
from torch import Tensor

from joma.watch import attention
from tiny_models import SIZES, with_large_weights

VOCABULARY, NEW = 10, 5


def window_model(window: int | None) -> Any:
    """Return a tiny Mistral whose layers attend to a sliding window."""
    sizes: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
    config = transformers.MistralConfig(**sizes, sliding_window=window, pad_token_id=0, eos_token_id=None)
    return with_large_weights(transformers.MistralForCausalLM(config))


class Generation(NamedTuple):
    """What was recorded while tokens were generated, and the weights [batch, head, query, key] of each layer."""

    data: xr.Dataset
    weights: tuple[Tensor, ...]
    real: Tensor

    def rows(self, measure: str) -> tuple[Tensor, Tensor]:
        """Return a measure [layer, head, row] of all rows of tokens, and of the weights at the same rows."""
        first = self.data.sizes["query"]
        values = torch.as_tensor(self.data[measure].values)
        recorded = torch.cat([values[0], *(part[..., :1] for part in values[1:])], dim=-1)
        weights = torch.stack(self.weights).double()[:, :, :, : recorded.shape[-1]]
        length = weights.shape[-1]
        if measure == "distance":
            distance = (torch.arange(recorded.shape[-1])[:, None] - torch.arange(length)).abs()
            expected = (weights * distance).sum(-1)
        else:
            starts = self.real.int().argmax(-1)
            expected = torch.stack([weights[:, index, :, :, start] for index, start in enumerate(starts)], dim=1)
        assert first < recorded.shape[-1]
        rows = self.real[:, : recorded.shape[-1]]
        return recorded.transpose(1, 2)[:, :, rows], expected.transpose(1, 2)[:, :, rows]


@torch.no_grad()
def generate(model: Any, tokens: Tensor, mask: Tensor, *, cache: str, implementation: str) -> Generation:
    """Generate tokens under the watcher, then compute the weights of all rows at once, without a cache."""
    model.set_attn_implementation(implementation)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "cache_implementation": cache}
    with attention(model, measures=("sink_mass", "distance"), reduce="none") as recording:
        result = model.generate(tokens, attention_mask=mask, **options)
    return Generation(recording.dataset(), *_weights(model, result, mask))


@torch.no_grad()
def step_by_step(model: Any, tokens: Tensor, prompt: int, *, implementation: str) -> Generation:
    """Call a model on a prompt and then token by token, with a cache that keeps all keys, and without a mask."""
    model.set_attn_implementation(implementation)
    cache = transformers.DynamicCache()
    with attention(model, measures=("sink_mass", "distance"), reduce="none") as recording:
        for part in (tokens[:, :prompt], *tokens[:, prompt:].split(1, dim=1)):
            model(part, past_key_values=cache)
    return Generation(recording.dataset(), *_weights(model, tokens, torch.ones_like(tokens)))


def _weights(model: Any, tokens: Tensor, mask: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    real = torch.nn.functional.pad(mask, (0, tokens.shape[1] - mask.shape[1]), value=1)
    model.set_attn_implementation("eager")
    options = {"position_ids": (real.cumsum(-1) - 1).clamp_min(0), "use_cache": False, "output_attentions": True}
    return model(tokens, attention_mask=real, **options).attentions, real.bool()
