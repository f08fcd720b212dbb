"""Probes: tensor to tensor, with no knowledge of models, so that a toy block and a large model are measured alike.

`entropy` has the entropy of attention, from its weights or from queries and keys alone; `rank` the stable rank;
`orthogonality` the cosines between embeddings or hidden states; `bounce` the fall and return of a measured curve,
compared with what noise alone would do; `alignment` how well hidden units represent latents; `permutation`, `position`
and `slices` what a model knows of the order of its tokens.
"""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
