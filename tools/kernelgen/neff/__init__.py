"""NEFFs: the container, and what one says about itself."""
