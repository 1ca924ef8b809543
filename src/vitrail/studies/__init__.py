"""The paper's experiments, on one grid runner."""
