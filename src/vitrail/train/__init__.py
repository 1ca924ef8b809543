"""Models that learn: losses, optimizers, the learning rate over the steps, averages of weights."""
