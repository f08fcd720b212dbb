"""Symmetry between positions: what breaks it."""
