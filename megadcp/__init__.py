"""megadcp: GPT pretraining for documents of very different lengths. Importing it loads neither torch nor hydra."""

__version__ = "0.1.0"
