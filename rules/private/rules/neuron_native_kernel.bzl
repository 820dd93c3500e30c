"""The output of NKI's own compiler for one kernel and target, made with the Python that has that compiler."""

load("//rules/private/actions:routes.bzl", "routed_to")

_TOOLCHAIN = "//rules:toolchain_type"

def _neuron_native_kernel_impl(ctx):
    toolchain = ctx.toolchains[_TOOLCHAIN].neuron
    made = ctx.actions.declare_file(ctx.label.name + ".json")
    mnemonic = "NeuronNative"
    if not toolchain.nki:
        ctx.actions.run_shell(
            arguments = [ctx.label.name, toolchain.nki_absence or "the %s is used" % toolchain.compiler],
            command = """echo "error: $1 needs NKI's own compiler: $2. Install AWS's packages neuronx-cc and nki into a virtual environment and name that in NEURON_SDK, or have the manifest say 'lowering: interpreted'" >&2; exit 1""",
            mnemonic = mnemonic,
            outputs = [made],
        )
    else:
        args = ctx.actions.args()
        args.add(toolchain.nki_driver)
        args.add(toolchain.nki_identity, format = "--identity=%s")
        args.add(ctx.file.emitter, format = "--emitter=%s")
        if ctx.attr.module:
            args.add(ctx.attr.module, format = "--module=%s")
        args.add(ctx.attr.call, format = "--call=%s")
        args.add(ctx.attr.target, format = "--target=%s")
        args.add(made, format = "--output=%s")
        ctx.actions.run(
            arguments = [args],
            executable = toolchain.nki,
            # Without a sandbox, like compiles: a sandbox may hide the SDK's folder.
            execution_requirements = {"no-sandbox": "1"},
            inputs = [ctx.file.emitter] + ctx.files.data + ctx.files.helpers,
            mnemonic = mnemonic,
            outputs = [made],
            progress_message = "Compiling %s by NKI" % ctx.label.name,
            toolchain = Label(_TOOLCHAIN),
            tools = [toolchain.nki_driver],
        )
    return [DefaultInfo(files = depset([made]))]

_neuron_native_kernel = rule(
    doc = """Compiles one kernel with NKI's own compiler (docs/reference/native-kernels.md).

The action depends on the kernel's file, its imports from its folder, and the compiler's name and version.""",
    implementation = _neuron_native_kernel_impl,
    attrs = {
        "call": attr.string(mandatory = True, doc = "The call, as JSON: the function, its array arguments by NumPy's names (`float32[128,512]`), its static arguments, grid and environment."),
        "data": attr.label_list(allow_files = True, doc = "Files that the kernel's module reads."),
        "emitter": attr.label(mandatory = True, allow_single_file = [".py"], doc = "The kernel's file."),
        "helpers": attr.label_list(allow_files = [".py"], doc = "Modules that the file imports from its folder."),
        "module": attr.string(doc = "The file's module name in its Python package; empty without a package."),
        "target": attr.string(mandatory = True, doc = "neuronx-cc's `--target`."),
    },
    toolchains = [_TOOLCHAIN],
)

def neuron_native_kernel(name, target, exec_properties = {}, **kwargs):
    """Compiles one kernel with NKI's own compiler.

    Args:
        name: the kernel.
        target: neuronx-cc's `--target`.
        exec_properties: the common attribute. `--@neuron_kernelgen//rules:route_compiles` adds the compiler and the target.
        **kwargs: the rule's other attributes.
    """
    _neuron_native_kernel(
        name = name,
        exec_properties = exec_properties | routed_to(target),
        target = target,
        **kwargs
    )
