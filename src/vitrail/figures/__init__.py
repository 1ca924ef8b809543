"""Pictures of runs and models: curves and confusions, grids of images, filters, positions, and where a model looks."""
