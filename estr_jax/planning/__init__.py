"""Plans for a TPU slice: the product's own programs, compiled for chips that nobody holds, and what they will cost."""
