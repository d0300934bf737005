"""The toolkit's version, in a file of its own: whoever records it needs no other part of the package."""

__version__ = "0.1.0"
