"""Small experiments that show why each step of the ladder is faster: python -m anatomy."""

from common.errors import needs

needs("torch", "tabulate")  # one line instead of a traceback
