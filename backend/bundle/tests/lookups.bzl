"""The table of a bundle's kernels, for lookups in C++ tests."""

def bundle_lookups(name, bundle):
    """Writes the table of a bundle of this project's manifests, from the plan and not from the bundle.

    Args:
        name: the target, and its file.
        bundle: the bundle's name, `<manifest>_<target>`.
    """
    native.genrule(
        name = name,
        testonly = True,
        srcs = ["@neuron_kernels//:plan.json"],
        outs = [name + ".txt"],
        cmd = "$(location //backend/bundle:lookups) $(location @neuron_kernels//:plan.json) {} >$@".format(bundle),
        tools = ["//backend/bundle:lookups"],
    )
