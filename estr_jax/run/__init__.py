"""The composition of a run: from a config to its parts, the two roles, the folder, and what programs call."""
