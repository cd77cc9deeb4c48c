"""Runs that survive processes and machines."""
