"""What the pages of docs/ show, run against live servers."""
