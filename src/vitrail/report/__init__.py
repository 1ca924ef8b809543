"""A run as a page to send to someone, and as a model card."""
