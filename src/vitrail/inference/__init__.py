"""Images in, predictions and features out: a model in use."""
