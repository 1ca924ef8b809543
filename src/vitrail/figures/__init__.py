"""Pictures of a run: curves, confusions and calibration as PNG, grids of images as JPEG."""
