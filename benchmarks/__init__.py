"""Measurements of what the README promises; each module is run with ``python -m``."""
