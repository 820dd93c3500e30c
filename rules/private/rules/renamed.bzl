"""A deprecated name of a target."""

load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

def _renamed_impl(ctx):
    actual = ctx.attr.actual

    # buildifier: disable=print
    print("{} is deprecated: its name is {}".format(ctx.label, actual.label))
    return [actual[DefaultInfo], actual[CcInfo]]

renamed = rule(
    doc = "A deprecated name of a C++ library. Analysis prints the new name.",
    implementation = _renamed_impl,
    attrs = {"actual": attr.label(mandatory = True, providers = [CcInfo], doc = "The target that has this name now.")},
    provides = [CcInfo],
)
