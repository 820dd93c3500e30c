"""The modules that AWS's test suites import besides NKI, built on kernelgen: one module per repository."""
