"""The package for fixed universal transformers; nothing is in it yet."""
