"""A run as a self-contained HTML page, and as a model card."""
