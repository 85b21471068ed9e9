"""Core of reply reading: what layouts, notations and families are, and the calls that they tell."""
