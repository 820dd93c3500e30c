"""One kernel compiled for one target."""

load("//rules/private:providers.bzl", "NeuronHloInfo", "NeuronNeffInfo")
load("//rules/private:targets.bzl", "TARGETS")
load("//rules/private/actions:compile.bzl", "compile")
load("//rules/private/actions:routes.bzl", "routed_to")

_TOOLCHAIN = "//rules:toolchain_type"

def _neuron_neff_impl(ctx):
    toolchain = ctx.toolchains[_TOOLCHAIN].neuron
    kernel = ctx.attr.hlo[NeuronHloInfo]
    neff = ctx.actions.declare_file(ctx.label.name)
    flags = ctx.attr.flags or TARGETS[ctx.attr.target].flags
    if ("--target", ctx.attr.target) not in zip(flags, flags[1:]):
        fail("{}: flags are to hold '--target {}'; they are {}".format(ctx.label, ctx.attr.target, " ".join(flags)))
    log = None if toolchain.simulator else ctx.actions.declare_file(ctx.label.name.removesuffix(".neff") + ".log")
    compile(ctx, toolchain, kernel, flags, neff, log)
    return [
        DefaultInfo(files = depset([neff])),
        OutputGroupInfo(log = depset([log] if log else [])),
        NeuronNeffInfo(
            flags = flags,
            identity = toolchain.identity,
            kernel = kernel,
            log = log,
            neff = neff,
            target = ctx.attr.target,
        ),
    ]

# Kernels do not depend on C++ options, so their output folder must not either: `-c opt` must not rebuild kernels.
def _any_compilation_mode_impl(_settings, _attr):
    return {"//command_line_option:compilation_mode": "fastbuild"}

_any_compilation_mode = transition(
    implementation = _any_compilation_mode_impl,
    inputs = [],
    outputs = ["//command_line_option:compilation_mode"],
)

_neuron_neff = rule(
    doc = """Compiles one kernel's HLO.

The action depends on the HLO, the compiler, its flags and the driver that runs it, and on nothing else. Only the scheduler uses `memory_mb` and `cpus`.""",
    implementation = _neuron_neff_impl,
    cfg = _any_compilation_mode,
    attrs = {
        "cpus": attr.int(default = 1, doc = "The CPUs to reserve for the compile."),
        "flags": attr.string_list(doc = "The arguments of neuronx-cc without file arguments; by default the target's."),
        "hlo": attr.label(mandatory = True, providers = [NeuronHloInfo], doc = "The `neuron_hlo` to compile."),
        "memory_mb": attr.int(default = 4096, doc = "The memory to reserve for the compile, in MiB."),
        "target": attr.string(mandatory = True, values = TARGETS.keys(), doc = "neuronx-cc's `--target`."),
        "_allowlist_function_transition": attr.label(default = "@bazel_tools//tools/allowlists/function_transition_allowlist"),
    },
    provides = [NeuronNeffInfo],
    toolchains = [_TOOLCHAIN],
)

def neuron_neff(name, target, exec_properties = {}, **kwargs):
    """Compiles one kernel's HLO.

    Args:
        name: the NEFF.
        target: neuronx-cc's `--target`.
        exec_properties: the common attribute. `--@neuron_kernelgen//rules:route_compiles` adds the compiler and the target.
        **kwargs: the rule's other attributes.
    """
    _neuron_neff(
        name = name,
        exec_properties = exec_properties | routed_to(target),
        target = target,
        **kwargs
    )
