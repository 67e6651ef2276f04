"""The version: the package's, a checkpoint's, and the build's, which reads this file."""

__version__ = "0.1.0"
