"""A run's records, and its folder on disk."""
