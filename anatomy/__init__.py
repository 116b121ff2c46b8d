"""Small experiments that show why each step helps: python -m anatomy lists them."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # what the profiler does, on stderr, tells a reader nothing
