"""The five theorems in NumPy and SciPy, float64: closed forms, and the flows that they solve.

`growth` has Theorems 2 and 4, and `bounce` the condition for the entropy's return; `mixture` has Theorem 3, and
`critical` its critical points; `hierarchy` has Theorem 5. `invariants` is Theorem 1, and `flows` integrates the block
that they all describe, with the `activations` of its hidden units.
"""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
