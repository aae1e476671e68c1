"""Transformers of all families: config, one forward pass, loading and saving."""
