"""NEFFs: the container, and the description in it."""
