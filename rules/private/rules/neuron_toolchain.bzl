"""The toolchain: a compiler from HLO to NEFF, known by what it calls itself."""

load("//rules/private:providers.bzl", "NeuronToolchainInfo")
load("//tools/bazel:kernelgen_tool.bzl", "KernelgenToolInfo")
load(":compiler_flag.bzl", "CompilerFlagInfo")

def _neuron_toolchain_impl(ctx):
    if ctx.attr.compiler == "simulator" and ctx.attr._flag[CompilerFlagInfo].value == "auto":
        # buildifier: disable=print
        print("no neuronx-cc here: NEFFs are made for the simulator and run on no device (--@neuron_kernelgen//rules:compiler=neuronx-cc demands real ones)")
    info = NeuronToolchainInfo(
        compiler = ctx.attr.compiler,
        disabled = ctx.attr.disabled,
        executable = ctx.file.executable,
        identity = ctx.attr.identity,
        tool = ctx.attr.tool[KernelgenToolInfo] if ctx.attr.tool else None,
    )
    return [platform_common.ToolchainInfo(neuron = info)]

neuron_toolchain = rule(
    doc = "A compiler for `toolchain_type`. One that is disabled lets analysis go on and fails a build with its reason.",
    implementation = _neuron_toolchain_impl,
    attrs = {
        "compiler": attr.string(mandatory = True, values = ["neuronx-cc", "simulator"]),
        "disabled": attr.string(doc = "Why this compiler can't be used."),
        "executable": attr.label(allow_single_file = True, doc = "neuronx-cc."),
        "identity": attr.string(doc = "Name and version; every NEFF's key has it. The simulator's own comes from its sources."),
        "tool": attr.label(
            default = "//tools/kernelgen:compile",
            doc = "The driver.",
            providers = [KernelgenToolInfo],
        ),
        "_flag": attr.label(default = "//rules:compiler"),
    },
)
