"""The paper's tables and figures: a study, its cells, its page; sweeps and searches beside it."""
