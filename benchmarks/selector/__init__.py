"""Measurements of the offline side."""
