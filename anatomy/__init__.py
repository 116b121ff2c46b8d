"""Small experiments that show why each step helps."""
