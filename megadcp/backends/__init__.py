"""Kernels behind one small factory."""
