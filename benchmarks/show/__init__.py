"""Recorded results as tables, figures and pages. Reads JSON; measures nothing."""
