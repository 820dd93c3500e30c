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

# A kernel does not depend on how C++ is compiled, and the folder that Bazel puts it in must not either: `-c opt` builds no kernel again.
def _any_compilation_mode_impl(_settings, _attr):
    return {"//command_line_option:compilation_mode": "fastbuild"}

_any_compilation_mode = transition(
    implementation = _any_compilation_mode_impl,
    inputs = [],
    outputs = ["//command_line_option:compilation_mode"],
)

_neuron_neff = rule(
    doc = """Compiles one kernel's HLO.

The HLO, the compiler, its flags and the driver that runs it are all that the action depends on: what leaves these as they were compiles
nothing. How much memory and how many CPUs a compile is counted for is known to the scheduler alone.""",
    implementation = _neuron_neff_impl,
    cfg = _any_compilation_mode,
    attrs = {
        "cpus": attr.int(default = 1, doc = "CPUs that one compile is counted for."),
        "flags": attr.string_list(doc = "neuronx-cc's arguments, all of them but those for files; by default the target's."),
        "hlo": attr.label(mandatory = True, providers = [NeuronHloInfo]),
        "memory_mb": attr.int(default = 4096, doc = "Memory that one compile is counted for, in MiB."),
        "target": attr.string(mandatory = True, values = TARGETS.keys(), doc = "neuronx-cc's `--target`."),
        "_allowlist_function_transition": attr.label(default = "@bazel_tools//tools/allowlists/function_transition_allowlist"),
    },
    provides = [NeuronNeffInfo],
    toolchains = [_TOOLCHAIN],
)

def neuron_neff(name, target, exec_properties = {}, **kwargs):
    """Compiles one kernel's HLO; see the rule.

    Args:
        name: the NEFF.
        target: neuronx-cc's `--target`.
        exec_properties: as of every rule. With `--@neuron_kernelgen//rules:route_compiles` the compiler and the target are added.
        **kwargs: as of the rule.
    """
    _neuron_neff(
        name = name,
        exec_properties = exec_properties | routed_to(target),
        target = target,
        **kwargs
    )
