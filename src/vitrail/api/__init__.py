"""The Python interface: the functions of `import vitrail`, which the commands call too."""
