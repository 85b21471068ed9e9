"""`make bench CASE=models`: what several models in one server cost."""
