"""Tensors in, tensors out: the Vision Transformer, its positions, its first weights and its cost."""
