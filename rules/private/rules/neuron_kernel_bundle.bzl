"""The kernels of one manifest for one target, as a pack and as a tree."""

load("//rules/private:providers.bzl", "NeuronBundleInfo", "NeuronNeffInfo")
load("//tools/bazel:kernelgen_tool.bzl", "KernelgenToolInfo", "run_kernelgen")

def _entry(neff):
    return json.encode({"hlo": neff.kernel.hlo.path, "neff": neff.neff.path, "spec": neff.kernel.spec})

def _neuron_kernel_bundle_impl(ctx):
    name = ctx.label.name
    neffs = [target[NeuronNeffInfo] for target in ctx.attr.neffs]
    for neff in neffs:
        if neff.flags != neffs[0].flags:
            fail("{}: a bundle's kernels are compiled with the same flags; {} has {}, {} has {}".format(
                ctx.label,
                neffs[0].neff.basename,
                " ".join(neffs[0].flags),
                neff.neff.basename,
                " ".join(neff.flags),
            ))
    files = [n.neff for n in neffs]
    hlos = [n.kernel.hlo for n in neffs]

    def bundle_args():
        args = ctx.actions.args()
        args.add("bundle")
        args.add(ctx.attr.manifest, format = "--name=%s")
        args.add_all(neffs[0].flags, format_each = "--flag=%s")
        if neffs[0].identity:
            args.add(neffs[0].identity, format = "--compiler=%s")
        args.add_all(neffs, map_each = _entry, format_each = "--entry=%s")
        return args

    def run(args, inputs, outputs, what):
        run_kernelgen(
            ctx,
            ctx.attr._tool[KernelgenToolInfo],
            args,
            worker = True,
            inputs = inputs,
            mnemonic = "NeuronBundle",
            outputs = outputs,
            progress_message = "{} {}".format(what, name),
        )

    pack = ctx.actions.declare_file(name + ".kernels.gguf")
    args = bundle_args()
    args.add(pack, format = "--pack=%s")
    run(args, files + hlos, [pack], "Packing")

    tree = ctx.actions.declare_directory(name + ".tree")
    args = bundle_args()
    args.add_all([tree], expand_directories = False, format_each = "--tree=%s")
    run(args, files + hlos, [tree], "Laying out")

    # What neuronx-cc is known to refuse is refused at once, also when it was compiled before the lint knew; no compile depends on it.
    linted = ctx.actions.declare_file(name + ".linted")
    args = ctx.actions.args()
    args.add("lint")
    args.add(neffs[0].target, format = "--target=%s")
    args.add_all(hlos, format_each = "--hlo=%s")
    args.add(linted, format = "--stamp=%s")
    run_kernelgen(
        ctx,
        ctx.attr._lint[KernelgenToolInfo],
        args,
        worker = True,
        inputs = hlos,
        mnemonic = "NeuronLint",
        outputs = [linted],
        progress_message = "Checking the kernels of " + name,
    )

    return [
        DefaultInfo(files = depset([pack]), runfiles = ctx.runfiles([pack])),
        OutputGroupInfo(
            _validation = depset([linted]),
            hlo = depset(hlos),
            neff = depset(files),
            pack = depset([pack]),
            tree = depset([tree]),
        ),
        NeuronBundleInfo(name = name, pack = pack, tree = tree),
    ]

neuron_kernel_bundle_rule = rule(
    doc = "A bundle. Building it makes the pack, for which no C++ compiler is needed.",
    implementation = _neuron_kernel_bundle_impl,
    attrs = {
        "manifest": attr.string(mandatory = True, doc = "The manifest's name."),
        "neffs": attr.label_list(mandatory = True, providers = [NeuronNeffInfo], doc = "Its kernels, compiled for one target with the same flags."),
        "_lint": attr.label(default = "//tools/kernelgen:lint", providers = [KernelgenToolInfo]),
        "_tool": attr.label(default = "//tools/kernelgen:bundle", providers = [KernelgenToolInfo]),
    },
    provides = [NeuronBundleInfo],
)
