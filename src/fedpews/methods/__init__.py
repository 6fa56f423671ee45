"""What a method is, the methods there are, and what they have in common."""

from fedpews.methods.average import Average
from fedpews.methods.contract import Client, Cohort, Download, Method, Upload, Work
from fedpews.methods.local import with_local
from fedpews.methods.registry import (
    METHODS,
    SERVERS,
    describe,
    make,
    make_server,
    method_class,
    takes_server,
    takes_warmup,
)

__all__ = [
    "METHODS",
    "SERVERS",
    "Average",
    "Client",
    "Cohort",
    "Download",
    "Method",
    "Upload",
    "Work",
    "describe",
    "make",
    "make_server",
    "method_class",
    "takes_server",
    "takes_warmup",
    "with_local",
]
