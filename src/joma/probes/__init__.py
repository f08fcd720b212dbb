"""Probes: tensor to tensor, with no knowledge of models, so that a toy block and a large model are measured alike.

`entropy` has the entropy of attention, from its weights or from queries and keys alone; `rank` the stable rank;
`orthogonality` the cosines between embeddings or hidden states; `bounce` the fall and return of a measured curve,
beside what noise alone would do; `alignment` how well hidden units represent latents.
"""
