"""Every table and figure of the paper: run what is missing, compare with its numbers, write a page."""
