"""Kernels of our own for an NVIDIA GPU, each beside the torch operators that define it."""
