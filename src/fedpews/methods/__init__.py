"""What a method is, what methods have in common, and the methods themselves, one file each."""

from fedpews.methods.average import Average
from fedpews.methods.contract import ClientHalf, Cohort, Download, Method, Upload, Work
from fedpews.methods.fedbn import Local

__all__ = ["Average", "ClientHalf", "Cohort", "Download", "Local", "Method", "Upload", "Work"]
