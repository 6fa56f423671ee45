"""Cells on other machines: a Dask scheduler hands them to its workers; each is an ordinary run folder in the end."""
