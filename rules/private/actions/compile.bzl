"""The compile action. Its inputs and arguments are exactly the identity of a NEFF."""

load("//rules/private:targets.bzl", "SIMULATOR_MEMORY_MB")
load("//rules/private/actions:resources.bzl", "resource_set")
load("//tools/bazel:kernelgen_tool.bzl", "run_kernelgen")

_MNEMONIC = "NeuronCompile"
_TOOLCHAIN = Label("//rules:toolchain_type")

def compile(ctx, toolchain, kernel, flags, neff, log):
    """Registers the compile of one HLO.

    Args:
        ctx: context of a rule with the attributes `cpus` and `memory_mb`.
        toolchain: NeuronToolchainInfo.
        kernel: NeuronHloInfo.
        flags: neuronx-cc's arguments.
        neff: the File to make, named `<kernel>.<settings>.neff`.
        log: the File for neuronx-cc's output; None for the simulator, which prints nothing.
    """
    hlo = kernel.hlo
    message = "Compiling %s (%s)" % (neff.basename, toolchain.compiler)
    if toolchain.disabled:
        ctx.actions.run_shell(
            arguments = [toolchain.disabled],
            command = 'echo "error: $1" >&2; exit 1',
            mnemonic = _MNEMONIC,
            outputs = [neff, log] if log else [neff],
        )
    elif toolchain.simulator:
        args = ctx.actions.args()
        args.add("compile")
        args.add(hlo, format = "--hlo=%s")
        args.add(neff, format = "--output=%s")
        args.add_all(flags, format_each = "--flag=%s")
        run_kernelgen(
            ctx,
            toolchain.simulator,
            args,
            # Only the simulator benefits from a persistent worker, which keeps XLA loaded.
            worker = True,
            inputs = [hlo],
            mnemonic = _MNEMONIC,
            outputs = [neff],
            progress_message = message,
            # XLA:CPU needs a fraction of neuronx-cc's resources.
            resource_set = resource_set(SIMULATOR_MEMORY_MB, 1),
            toolchain = _TOOLCHAIN,
        )
    else:
        compiler = toolchain.native if kernel.native else toolchain.executable
        args = ctx.actions.args()
        args.add(toolchain.driver)
        args.add(compiler, format = "--compiler=%s")
        args.add(toolchain.identity, format = "--identity=%s")
        args.add(hlo, format = "--hlo=%s")
        args.add(neff, format = "--output=%s")
        args.add(log, format = "--log=%s")
        args.add("--")
        args.add_all(flags)
        ctx.actions.run(
            arguments = [args],
            executable = toolchain.python,
            # The driver isolates the compiler with its own scratch folder and environment. A sandbox would hide the log of a failure.
            execution_requirements = {"no-sandbox": "1"},
            inputs = [hlo],
            mnemonic = _MNEMONIC,
            outputs = [neff, log],
            progress_message = message,
            resource_set = resource_set(ctx.attr.memory_mb, ctx.attr.cpus),
            toolchain = _TOOLCHAIN,
            tools = [toolchain.driver, compiler] + ([toolchain.native_tools] if kernel.native else []),
        )
