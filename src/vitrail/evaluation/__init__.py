"""Model and batches in, numbers out."""
