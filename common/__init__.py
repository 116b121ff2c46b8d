"""What the steps share: model, data, measurement, record."""

import sys

if sys.platform == "win32":
    sys.exit("error: this runs on Linux, and on Windows inside WSL2: learn.microsoft.com/windows/wsl/install")
