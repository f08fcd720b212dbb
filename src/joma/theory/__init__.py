"""The five theorems and dynamics by others in NumPy and SciPy, float64: closed forms, and the flows that they solve.

- `growth`: Theorems 2 and 4; `bounce`: whether and when the entropy of Theorem 4 returns.
- `mixture`: Theorem 3; `critical`: its critical points.
- `hierarchy`: Theorem 5.
- `invariants`: Theorem 1, the prediction and the ledger; `factored`: that of logits that are products of keys.
- `block_flow`: the coupled flow of the block that they all describe, with `activations` and `losses`.
- `value_flow`: the flow of a block with values, and LayerNorm and an MLP above them.
- `populations`: all contexts of a source of tokens; `optimum`: where the block's cross entropy is least on them.
- `flows`: the reduced flows; `integration`: the integrator of all of them.

Results by others on how Transformers learn, with what is ours beside them:

- `value_softmax`: values and one softmax vector trained together, and the orbit that all losses of a margin share.
- `in_context`: in-context linear regression with linear attention; `in_context_descent`: several steps of descent.
- `margins`: hard-margin support vector machines of least norm; `token_selection`: attention that is trained alone.
- `rank_collapse`: attention without skips; `entropy_floor`: how low the entropy of attention can be, `entropy_search`.
- `even_pairs`: all binary sequences up to a length, the layer that reads them, parity by a chain of thought.
- `markov`: one layer on a binary chain; `in_context_markov`: chains drawn anew for every sequence.
- `in_context_autoregression`: estimating the map of a linear recurrence in context.
"""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
