"""Versioned weights on their way from the learner's hosts to the samplers."""
