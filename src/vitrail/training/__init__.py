"""Training: runs and their folders, the trainer, steps, losses, optimizers, schedules, checkpoints."""
