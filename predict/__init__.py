"""What a step takes on a machine whose roofs were measured: python -m predict. Optional: no run needs it."""
