"""Reports from records."""

import os

# Jupyter and Colab name a backend that only their own process can load. A user's matplotlibrc may be broken.
os.environ |= {"MPLBACKEND": "agg", "MATPLOTLIBRC": os.devnull}
