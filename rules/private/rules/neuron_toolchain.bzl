"""The toolchain: a compiler from HLO to NEFF, known by what it calls itself."""

load("//rules/private:providers.bzl", "NeuronToolchainInfo")
load("//tools/bazel:kernelgen_tool.bzl", "KernelgenToolInfo")
load(":compiler_flag.bzl", "CompilerFlagInfo")

def _neuron_toolchain_impl(ctx):
    simulated = ctx.attr.compiler == "simulator"
    if simulated and ctx.attr._flag[CompilerFlagInfo].value == "auto":
        # buildifier: disable=print
        print("no neuronx-cc here: NEFFs are made for the simulator and run on no device (--@neuron_kernelgen//rules:compiler=neuronx-cc demands real ones)")
    info = NeuronToolchainInfo(
        compiler = ctx.attr.compiler,
        disabled = ctx.attr.disabled,
        driver = None if simulated else ctx.file._driver,
        executable = ctx.file.executable,
        identity = ctx.attr.identity,
        python = ctx.file.python,
        simulator = ctx.attr._simulator[KernelgenToolInfo] if simulated else None,
    )
    return [platform_common.ToolchainInfo(neuron = info)]

neuron_toolchain = rule(
    doc = "A compiler for `toolchain_type`. One that is disabled lets analysis go on and fails a build with its reason.",
    implementation = _neuron_toolchain_impl,
    attrs = {
        "compiler": attr.string(mandatory = True, values = ["neuronx-cc", "simulator"]),
        "disabled": attr.string(doc = "Why this compiler can't be used."),
        "executable": attr.label(allow_single_file = True, doc = "neuronx-cc."),
        "identity": attr.string(doc = "Name and version; every NEFF's key has it. The simulator's own comes from its sources and jaxlib's version."),
        "python": attr.label(allow_single_file = True, doc = "Runs Python 3.8 or later for neuronx-cc's driver; its bytes are part of every NEFF's key, so they should not name a version."),
        "_driver": attr.label(default = "//tools/kernelgen:neuronx_cc_driver", allow_single_file = True),
        "_flag": attr.label(default = "//rules:compiler"),
        "_simulator": attr.label(default = "//tools/kernelgen:simulate", providers = [KernelgenToolInfo]),
    },
)
