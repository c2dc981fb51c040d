"""The backends that come with the core, one module each; every other backend is a distribution of its own.

Importing this package imports none of them.
"""
