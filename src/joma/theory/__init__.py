"""The five theorems in NumPy and SciPy, float64: closed forms, and the flows that they solve.

- `growth`: Theorems 2 and 4; `bounce`: whether and when the entropy of Theorem 4 returns.
- `mixture`: Theorem 3; `critical`: its critical points.
- `hierarchy`: Theorem 5.
- `invariants`: Theorem 1, the prediction and the ledger; `factored`: that of logits that are products of keys.
- `block_flow`: the coupled flow of the block that they all describe, with `activations` and `losses`.
- `value_flow`: the flow of a block with values, and LayerNorm and an MLP above them.
- `populations`: all contexts of a source of tokens; `optimum`: where the block's cross entropy is least on them.
- `flows`: the reduced flows; `integration`: the integrator of all of them.
"""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
