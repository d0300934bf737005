"""Rows become words, tables, figures and pages. Pure functions: records in, text or figures out, nothing is read."""
