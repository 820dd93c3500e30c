"""A bundle as a C++ library. It is a rule of its own, so that building a pack requires no C++ toolchain."""

load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain", "use_cc_toolchain")
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")
load("//rules/private:providers.bzl", "NeuronBundleInfo")
load("//tools/bazel:kernelgen_tool.bzl", "KernelgenToolInfo", "run_kernelgen")

def _neuron_bundle_cc_impl(ctx):
    bundle = ctx.attr.bundle[NeuronBundleInfo]
    name, pack = bundle.name, bundle.pack
    folder = name + ".embed/neuron_kernels/"
    assembly, source, header = [ctx.actions.declare_file(folder + name + suffix) for suffix in [".S", ".c", ".h"]]
    args = ctx.actions.args()
    args.add("embed")
    args.add(pack, format = "--pack=%s")
    args.add(header.dirname, format = "--output=%s")
    run_kernelgen(
        ctx,
        ctx.attr._tool[KernelgenToolInfo],
        args,
        worker = False,
        inputs = [pack],
        mnemonic = "NeuronBundle",
        outputs = [assembly, source, header],
        progress_message = "Embedding " + name,
    )

    cc_toolchain = find_cc_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = cc_toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    library = ctx.attr._library[CcInfo]
    compilation, objects = cc_common.compile(
        name = name,
        actions = ctx.actions,
        # The assembly includes the NEFFs and the tables from the pack.
        additional_inputs = [pack],
        cc_toolchain = cc_toolchain,
        compilation_contexts = [library.compilation_context],
        feature_configuration = features,
        public_hdrs = [header],
        srcs = [assembly, source],
        system_includes = [header.dirname.removesuffix("/neuron_kernels")],
    )
    linking, libraries = cc_common.create_linking_context_from_compilation_outputs(
        name = name,
        actions = ctx.actions,
        cc_toolchain = cc_toolchain,
        compilation_outputs = objects,
        disallow_dynamic_library = True,
        feature_configuration = features,
        linking_contexts = [library.linking_context],
    )
    archive = libraries.library_to_link.pic_static_library or libraries.library_to_link.static_library

    return [
        DefaultInfo(files = depset([archive, header])),
        CcInfo(compilation_context = compilation, linking_context = linking),
    ]

neuron_bundle_cc = rule(
    doc = "A library with the kernels embedded. cc rules that depend on it link the kernels.",
    implementation = _neuron_bundle_cc_impl,
    attrs = {
        "bundle": attr.label(mandatory = True, providers = [NeuronBundleInfo], doc = "The `neuron_kernel_bundle` whose kernels are linked in."),
        "_library": attr.label(default = "//backend/bundle:neuron_kernels", providers = [CcInfo]),
        "_tool": attr.label(default = "//tools/kernelgen:bundle", providers = [KernelgenToolInfo]),
    },
    fragments = ["cpp"],
    provides = [CcInfo],
    toolchains = use_cc_toolchain(),
)
