"""Small experiments that show why each step helps: python -m anatomy."""

from common.errors import needs

needs("torch", "tabulate")  # one line in place of a traceback, whichever command of this package is run
