"""Releases: the version, the API's image, the packages, their bills of materials, the formula."""
