"""Stories of a server of several models: loads, requests, unloads and ends of the process, in one budget."""
