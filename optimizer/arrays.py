"""The types of arrays that the planner computes with."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Number = Any  # a float or an array of floats: numpy broadcasts
