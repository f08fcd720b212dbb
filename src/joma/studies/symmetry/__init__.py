"""Studies of what breaks the symmetry between positions."""
