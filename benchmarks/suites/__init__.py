"""What AWS's test suites import besides NKI itself, made of kernelgen: a module per repository."""
