"""Figures of runs and models: training curves, confusion matrices, image grids, filters, positions and attention."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Pixels = NDArray[np.uint8]
