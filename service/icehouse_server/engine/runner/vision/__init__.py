"""Images: models with a vision tower, and the vectors that it makes of images (inference thread)."""
