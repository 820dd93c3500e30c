"""The kernels of one manifest for one target, in the three forms in which a backend takes them."""

load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain", "use_cc_toolchain")
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")
load("//rules/private:providers.bzl", "NeuronBundleInfo", "NeuronNeffInfo")
load("//tools/bazel:kernelgen_tool.bzl", "KernelgenToolInfo", "run_kernelgen")

def _entry(neff):
    return json.encode({"hlo": neff.kernel.hlo.path, "neff": neff.neff.path, "spec": neff.kernel.spec})

def _neuron_kernel_bundle_impl(ctx):
    name = ctx.label.name
    neffs = [target[NeuronNeffInfo] for target in ctx.attr.neffs]
    files = [n.neff for n in neffs]
    hlos = [n.kernel.hlo for n in neffs]

    def bundle_args():
        args = ctx.actions.args()
        args.add("bundle")
        args.add(ctx.attr.manifest, format = "--name=%s")
        args.add(ctx.attr.config, format = "--config=%s")
        if neffs[0].identity:
            args.add(neffs[0].identity, format = "--compiler=%s")
        args.add_all(neffs, map_each = _entry, format_each = "--entry=%s")
        return args

    def run(args, inputs, outputs, what):
        run_kernelgen(
            ctx,
            ctx.attr._tool[KernelgenToolInfo],
            args,
            worker = False,
            inputs = inputs,
            mnemonic = "NeuronBundle",
            outputs = outputs,
            progress_message = "{} {}".format(what, name),
        )

    pack = ctx.actions.declare_file(name + ".kernels.gguf")
    lookups = ctx.actions.declare_file(name + ".lookups.txt")
    args = bundle_args()
    args.add(pack, format = "--pack=%s")
    args.add(lookups, format = "--lookups=%s")
    run(args, files + hlos, [pack, lookups], "Packing")

    tree = ctx.actions.declare_directory(name + ".tree")
    args = bundle_args()
    args.add_all([tree], expand_directories = False, format_each = "--tree=%s")
    run(args, files + hlos, [tree], "Laying out")

    folder = name + ".embed/neuron_kernels/"
    assembly, source, header = [ctx.actions.declare_file(folder + name + suffix) for suffix in [".S", ".c", ".h"]]
    args = ctx.actions.args()
    args.add("embed")
    args.add(pack, format = "--pack=%s")
    args.add(header.dirname, format = "--output=%s")
    run(args, [pack], [assembly, source, header], "Embedding")

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
        # The assembly takes the NEFFs and the tables out of the pack.
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
        DefaultInfo(files = depset([pack]), runfiles = ctx.runfiles([pack])),
        OutputGroupInfo(
            cc = depset([archive, header]),
            hlo = depset(hlos),
            lookups = depset([lookups]),
            neff = depset(files),
            pack = depset([pack]),
            tree = depset([tree]),
        ),
        NeuronBundleInfo(lookups = lookups, pack = pack, tree = tree),
        CcInfo(compilation_context = compilation, linking_context = linking),
    ]

neuron_kernel_bundle_rule = rule(
    doc = "A bundle. Built by itself it is a pack; a cc rule that depends on it gets the kernels embedded.",
    implementation = _neuron_kernel_bundle_impl,
    attrs = {
        "config": attr.string(mandatory = True, doc = "Compile settings as JSON."),
        "manifest": attr.string(mandatory = True, doc = "The manifest's name."),
        "neffs": attr.label_list(mandatory = True, providers = [NeuronNeffInfo]),
        "_library": attr.label(default = "//backend/bundle:neuron_kernels", providers = [CcInfo]),
        "_tool": attr.label(default = "//tools/kernelgen:bundle", providers = [KernelgenToolInfo]),
    },
    fragments = ["cpp"],
    provides = [NeuronBundleInfo, CcInfo],
    toolchains = use_cc_toolchain(),
)

def _bundle_cc_impl(ctx):
    return [
        DefaultInfo(files = ctx.attr.bundle[OutputGroupInfo].cc),
        ctx.attr.bundle[CcInfo],
    ]

neuron_bundle_cc = rule(
    doc = "A bundle as a C++ library: building it makes the archive with the kernels embedded.",
    implementation = _bundle_cc_impl,
    attrs = {"bundle": attr.label(mandatory = True, providers = [NeuronBundleInfo, CcInfo])},
    provides = [CcInfo],
)
