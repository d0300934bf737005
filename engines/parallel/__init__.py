"""Ranks and what they exchange."""
