"""Language models on real text, and the training that the studies of them share."""
