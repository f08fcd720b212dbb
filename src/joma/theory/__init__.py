"""The five theorems in NumPy and SciPy, float64: closed forms, and the flows that they solve.

`growth` has Theorems 2 and 4, and `bounce` the condition for the entropy's return; `mixture` has Theorem 3, and
`critical` its critical points; `hierarchy` has Theorem 5. `invariants` is Theorem 1, and `flows` integrates the block
that they all describe, with the `activations` of its hidden units.
"""

from __future__ import annotations

from joma.theory import activations, bounce, critical, flows, growth, hierarchy, invariants, mixture

__all__ = ["activations", "bounce", "critical", "flows", "growth", "hierarchy", "invariants", "mixture"]
