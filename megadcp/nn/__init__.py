"""The GPT in plain PyTorch; knows nothing of ranks."""
