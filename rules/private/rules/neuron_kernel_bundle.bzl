"""The kernels of one manifest for one target, as a pack and as a tree."""

load("//rules/private:providers.bzl", "NeuronBundleInfo", "NeuronNeffInfo")
load("//tools/bazel:kernelgen_tool.bzl", "KernelgenToolInfo", "run_kernelgen")
load(":compiler_flag.bzl", "CHOICES")

def _own_flags(neff):
    return json.encode(neff.flags)

def _entries(ctx, neffs):
    """Returns the file with the bundle's entries: the plan's, or one that the attributes describe."""
    if ctx.file.entries:
        return ctx.file.entries
    if not ctx.attr.manifest:
        fail("{}: `entries` or `manifest` is needed".format(ctx.label))
    entries = ctx.actions.declare_file(ctx.label.name + ".entries.json")
    kernels = [
        {"flags": n.flags, "kernel": n.kernel.id, "noted": bool(n.kernel.notes), "spec": json.decode(n.kernel.spec)}
        for n in neffs
    ]
    ctx.actions.write(entries, json.encode({"entries": kernels, "flags": ctx.attr.flags or neffs[0].flags, "format": 1, "name": ctx.attr.manifest}))
    return entries

def _bundle(ctx, entries, neffs, output, form, what):
    """Registers the action that writes one form of the bundle."""
    args = ctx.actions.args()
    args.add("bundle")
    args.add(entries, format = "--entries=%s")
    args.add_all([n.kernel.hlo for n in neffs], format_each = "--hlo=%s")
    args.add_all([n.neff for n in neffs], format_each = "--neff=%s")
    if neffs[0].identity:
        args.add(neffs[0].identity, format = "--compiler=%s")
    args.add_all([output], expand_directories = False, format_each = "--" + form + "=%s")
    run_kernelgen(
        ctx,
        ctx.attr._tool[KernelgenToolInfo],
        args,
        worker = True,
        inputs = [entries] + [n.neff for n in neffs] + [n.kernel.hlo for n in neffs] + [n.kernel.notes for n in neffs if n.kernel.notes],
        mnemonic = "NeuronBundle",
        outputs = [output],
        progress_message = "{} {}".format(what, ctx.label.name),
    )

def _lint(ctx, neffs, stamp):
    """Registers the action that checks HLO against the known limits of neuronx-cc.

    No compile depends on this action, so the check also refuses kernels that were compiled before the lint had the rule. It checks each
    kernel with the flags of its compile.
    """
    hlos = [n.kernel.hlo for n in neffs]
    args = ctx.actions.args()
    args.add("lint")
    args.add_all(hlos, format_each = "--hlo=%s")
    args.add_all(neffs, map_each = _own_flags, format_each = "--flags=%s")
    args.add(stamp, format = "--stamp=%s")
    run_kernelgen(
        ctx,
        ctx.attr._lint[KernelgenToolInfo],
        args,
        worker = True,
        inputs = hlos,
        mnemonic = "NeuronLint",
        outputs = [stamp],
        progress_message = "Checking the kernels of " + ctx.label.name,
    )

def _neuron_kernel_bundle_impl(ctx):
    name = ctx.label.name
    neffs = [target[NeuronNeffInfo] for target in ctx.attr.neffs]
    entries = _entries(ctx, neffs)
    pack = ctx.actions.declare_file(name + ".kernels.gguf")
    _bundle(ctx, entries, neffs, pack, "pack", "Packing")
    tree = ctx.actions.declare_directory(name + ".tree")
    _bundle(ctx, entries, neffs, tree, "tree", "Laying out")
    linted = ctx.actions.declare_file(name + ".linted")
    _lint(ctx, neffs, linted)
    logs = depset([n.log for n in neffs if n.log])
    return [
        DefaultInfo(files = depset([pack]), runfiles = ctx.runfiles([pack])),
        OutputGroupInfo(
            _validation = depset([linted]),
            hlo = depset([n.kernel.hlo for n in neffs]),
            log = logs,
            neff = depset([n.neff for n in neffs]),
            pack = depset([pack]),
            tree = depset([tree]),
        ),
        NeuronBundleInfo(logs = logs, name = name, pack = pack, tree = tree),
    ]

_FLAGS = ["//rules:compiler"]

def _own_settings_impl(settings, attr):
    return {"//rules:compiler": attr.compiler or settings["//rules:compiler"]}

_own_settings = transition(
    implementation = _own_settings_impl,
    inputs = _FLAGS,
    outputs = _FLAGS,
)

neuron_kernel_bundle_rule = rule(
    doc = "A bundle of kernels. Its default output is the pack, which requires no C++ compiler.",
    implementation = _neuron_kernel_bundle_impl,
    cfg = _own_settings,
    attrs = {
        "compiler": attr.string(values = [""] + CHOICES, doc = "Overrides the flag //rules:compiler for this bundle."),
        "entries": attr.label(allow_single_file = [".json"], doc = "The plan of the bundle, with a kernel for each of `neffs`. Without a plan, the other attributes describe the bundle."),
        "flags": attr.string_list(doc = "The flags that the bundle records as its own, without a plan; by default those of its first kernel."),
        "manifest": attr.string(doc = "The manifest's name; required without `entries`."),
        "neffs": attr.label_list(allow_empty = False, mandatory = True, providers = [NeuronNeffInfo], doc = "The kernels, compiled for one target."),
        "_allowlist_function_transition": attr.label(default = "@bazel_tools//tools/allowlists/function_transition_allowlist"),
        "_lint": attr.label(default = "//tools/kernelgen:lint", providers = [KernelgenToolInfo]),
        "_tool": attr.label(default = "//tools/kernelgen:bundle", providers = [KernelgenToolInfo]),
    },
    provides = [NeuronBundleInfo],
)
