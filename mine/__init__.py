"""A model that is not ours, as a user's file has it: ./run_all.sh --model FILE."""
