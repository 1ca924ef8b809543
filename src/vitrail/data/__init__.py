"""Bytes in, batches out."""
