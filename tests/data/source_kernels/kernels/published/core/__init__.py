from .scaled import scaled as scaled
