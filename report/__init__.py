"""Reports from records."""

import os
import sys

from common.text import PACKAGES

# Jupyter and Colab name a backend that only their own process can load. A user's matplotlibrc may be broken.
os.environ |= {"MPLBACKEND": "agg", "MATPLOTLIBRC": os.devnull}
# First, so that its NumPy fits the others: this process imports no torch.
sys.path.insert(0, str(PACKAGES / "report"))
