"""Samplers that return tokens *and* the latents they came from, so that both can be compared with what a model learns.

`tokens` has classes of sequences over distinct and common tokens; `trees` has the latent trees that are sampled,
`combinations` the deterministic ones. `text` has corpora of real text, located by `sources`; `addition` has sums of
numbers, character by character. Randomness arrives as a `torch.Generator`, or as a key of `joma.noise`.
"""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
