"""Probes: tensor to tensor, with no knowledge of models, so that a toy block and a large model are measured alike."""
