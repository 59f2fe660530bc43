"""The version, in a module that needs nothing: also a tree that was never installed knows it."""

__version__ = "0.1.0"
