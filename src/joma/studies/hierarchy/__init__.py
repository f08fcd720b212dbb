"""Latent hierarchies: what hidden units represent, and in which order it is learned."""
