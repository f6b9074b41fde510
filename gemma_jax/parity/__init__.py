"""Comparing what engines generate: records, flips and their margins, bounds, reports."""
