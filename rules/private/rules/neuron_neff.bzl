"""One kernel compiled for one target."""

load("@neuron_sdk//:identity.bzl", "IDENTITY")
load("//rules/private:providers.bzl", "NeuronHloInfo", "NeuronNeffInfo")
load("//rules/private/actions:resources.bzl", "resource_set")
load("//tools/bazel:kernelgen_tool.bzl", "run_kernelgen")

_TOOLCHAIN = "//rules:toolchain_type"

def _neuron_neff_impl(ctx):
    toolchain = ctx.toolchains[_TOOLCHAIN].neuron
    kernel = ctx.attr.hlo[NeuronHloInfo]
    neff = ctx.actions.declare_file(ctx.label.name)
    if toolchain.disabled:
        ctx.actions.run_shell(
            arguments = [toolchain.disabled],
            command = 'echo "error: $1" >&2; exit 1',
            mnemonic = "NeuronCompile",
            outputs = [neff],
        )
    else:
        simulated = toolchain.compiler == "simulator"
        args = ctx.actions.args()
        args.add("compile")
        args.add(toolchain.compiler, format = "--compiler=%s")
        args.add(ctx.attr.config, format = "--config=%s")
        args.add(kernel.id, format = "--kernel=%s")
        args.add(kernel.hlo, format = "--hlo=%s")
        args.add(neff, format = "--output=%s")
        inputs = [kernel.hlo]
        if not simulated:
            args.add(toolchain.executable, format = "--executable=%s")
            args.add(toolchain.identity, format = "--identity=%s")
            args.add(ctx.attr.memory_mb, format = "--memory-mb=%s")
            inputs.append(toolchain.executable)
        run_kernelgen(
            ctx,
            toolchain.tool,
            args,
            # Only the simulator gains from a process that stays: it keeps XLA loaded.
            worker = simulated,
            # The driver gives the compiler a scratch folder and an environment of its own; a sandbox would hide the log of a failure.
            execution_requirements = {} if simulated else {"no-sandbox": "1"},
            inputs = inputs,
            mnemonic = "NeuronCompile",
            outputs = [neff],
            progress_message = "Compiling %s (%s)" % (ctx.label.name, toolchain.compiler),
            # XLA:CPU needs a fraction of what neuronx-cc does.
            resource_set = resource_set(1024, 1) if simulated else resource_set(ctx.attr.memory_mb, ctx.attr.cpus),
        )
    return [
        DefaultInfo(files = depset([neff])),
        NeuronNeffInfo(config = ctx.attr.config, identity = toolchain.identity, kernel = kernel, neff = neff),
    ]

_neuron_neff = rule(
    doc = "Compiles one kernel's HLO. The HLO and the compiler are the action's only inputs, so what leaves the HLO as it was compiles nothing.",
    implementation = _neuron_neff_impl,
    attrs = {
        "config": attr.string(mandatory = True, doc = "Compile settings as JSON; see CompileConfig."),
        "cpus": attr.int(default = 1, doc = "CPUs that one compile is counted for."),
        "hlo": attr.label(mandatory = True, providers = [NeuronHloInfo]),
        "memory_mb": attr.int(default = 4096, doc = "Memory that one compile may use, in MiB."),
    },
    provides = [NeuronNeffInfo],
    toolchains = [_TOOLCHAIN],
)

def _routed(compiler, target):
    """Returns the execution properties by which a cluster gives a compile to a worker that can do it."""
    return {"neuron-compiler": compiler, "neuron-target": target}

def neuron_neff(name, config, exec_properties = {}, **kwargs):
    """Compiles one kernel's HLO; see the rule.

    Args:
        name: the NEFF.
        config: compile settings as JSON; see CompileConfig.
        exec_properties: as of every rule. With `--@neuron_kernelgen//rules:route_compiles` the compiler and the target are added.
        **kwargs: as of the rule.
    """
    target = json.decode(config)["target"]
    _neuron_neff(
        name = name,
        config = config,
        exec_properties = exec_properties | select({
            Label("//rules:routed_to_auto"): _routed(IDENTITY or "simulator", target),
            Label("//rules:routed_to_neuronx-cc"): _routed(IDENTITY, target),
            Label("//rules:routed_to_simulator"): _routed("simulator", target),
            "//conditions:default": {},
        }),
        **kwargs
    )
