"""A search for settings by Optuna: every trial is a cell, and only validation data choose."""
