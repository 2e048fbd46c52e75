"""Ways to and from other programs' models."""
