"""The queue between samplers and the learner. The proof that no token trained on is older than the staleness bound
stands in `admission.py`."""
