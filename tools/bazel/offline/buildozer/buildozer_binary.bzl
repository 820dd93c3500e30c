"""The extension that Bazel's own tools module names. It creates an empty repository."""

def _empty_repository_impl(rctx):
    rctx.file("BUILD.bazel", "")

_empty_repository = repository_rule(implementation = _empty_repository_impl)

def _buildozer_binary_impl(_mctx):
    _empty_repository(name = "buildozer_binary")

buildozer_binary = module_extension(implementation = _buildozer_binary_impl)
