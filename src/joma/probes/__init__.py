"""Probes: functions of tensors that know nothing about models, so that small and large models are measured alike.

- `entropy`: the entropy of attention, from its weights or from queries and keys alone.
- `summary`: entropy and what else one may ask of attention: weights, sinks, distances, logits.
- `floor`: how low the entropy of attention can be, given the size of its logits.
- `rank`: the stable rank of weights.
- `spectrum`: the stable rank and the participation ratio of hidden states.
- `orthogonality`: the cosines between embeddings or hidden states.
- `alignment`: how well hidden units represent latents.
- `balance`: what gradient flow keeps of a head, and how far training leaves it.
- `bounce`: the fall and return of a measured curve, compared with noise.
- `permutation`: how much a prediction depends on the order of the earlier tokens.
- `position`: how well positions can be read off hidden states, and whether neighbours are similar.
- `slices`: whether the hidden states above a location stay similar to it from layer to layer.

A probe handles diverged seeds: where the input of one seed holds NaN its result is NaN, without an error or a warning,
and the results of the other seeds are what they would be without it.
"""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
