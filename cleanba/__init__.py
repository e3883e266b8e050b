"""Cleanba: distributed reinforcement learning whose numbers do not depend on how it is distributed."""

__version__ = "0.1.0"
