"""One kernel's HLO."""

load("//rules/private:providers.bzl", "NeuronHloInfo")
load("//tools/bazel:kernelgen_tool.bzl", "KernelgenToolInfo", "run_kernelgen")

def _neuron_hlo_impl(ctx):
    kernel = ctx.label.name.removesuffix(".hlo")
    hlo = ctx.actions.declare_file(kernel + ".hlo.pb")
    args = ctx.actions.args()
    args.add("emit")
    args.add(ctx.attr.spec, format = "--spec=%s")
    args.add(ctx.attr.library, format = "--library=%s")
    args.add(ctx.file.emitter, format = "--emitter=%s")
    args.add(hlo, format = "--output=%s")
    run_kernelgen(
        ctx,
        ctx.attr._tool[KernelgenToolInfo],
        args,
        worker = True,
        inputs = [ctx.file.emitter] + ctx.files.helpers,
        mnemonic = "NeuronEmit",
        outputs = [hlo],
        progress_message = "Emitting " + kernel,
    )
    return [
        DefaultInfo(files = depset([hlo])),
        NeuronHloInfo(hlo = hlo, id = kernel, spec = ctx.attr.spec),
    ]

neuron_hlo = rule(
    doc = "Emits one kernel. The emitter's own module and the helpers it imports are the action's only sources.",
    implementation = _neuron_hlo_impl,
    attrs = {
        "emitter": attr.label(mandatory = True, allow_single_file = [".py"], doc = "The module that registers the op."),
        "helpers": attr.label_list(allow_files = [".py"], doc = "Modules it imports from its own library."),
        "library": attr.string(default = "kernels", doc = "Name of the emitter's library."),
        "spec": attr.string(mandatory = True, doc = "The KernelSpec as canonical JSON."),
        "_tool": attr.label(default = "//tools/kernelgen:emit", providers = [KernelgenToolInfo]),
    },
    provides = [NeuronHloInfo],
)
