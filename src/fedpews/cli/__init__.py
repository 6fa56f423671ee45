"""The command line: parse, call, print. One file for each group of commands."""

from fedpews.cli.commands import app, main

__all__ = ["app", "main"]
