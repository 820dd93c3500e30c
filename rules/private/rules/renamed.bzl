"""A target under the name that it had before."""

load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

def _renamed_impl(ctx):
    actual = ctx.attr.actual

    # buildifier: disable=print
    print("{} is deprecated: its name is {}".format(ctx.label, actual.label))
    return [actual[DefaultInfo], actual[CcInfo]]

renamed = rule(
    doc = "A C++ library that has another name now; it says so when it is analysed.",
    implementation = _renamed_impl,
    attrs = {"actual": attr.label(mandatory = True, providers = [CcInfo])},
    provides = [CcInfo],
)
