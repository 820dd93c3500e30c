"""What NKI's own compiler makes of one kernel for one target, by the Python that has it."""

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
        call = {
            "arrays": ctx.attr.arrays,
            "env": ctx.attr.env,
            "function": ctx.attr.function,
            "grid": ctx.attr.grid,
            "keywords": {name: json.decode(value) for name, value in ctx.attr.params.items()},
        }
        args = ctx.actions.args()
        args.add(toolchain.nki_driver)
        args.add(toolchain.nki_identity, format = "--identity=%s")
        args.add(ctx.file.emitter, format = "--emitter=%s")
        if ctx.attr.module:
            args.add(ctx.attr.module, format = "--module=%s")
        args.add(json.encode(call), format = "--call=%s")
        args.add(ctx.attr.target, format = "--target=%s")
        args.add(made, format = "--output=%s")
        ctx.actions.run(
            arguments = [args],
            executable = toolchain.nki,
            # As the compile's: the SDK may be in a folder that a sandbox hides. What the file reads when it is imported, the step that
            # emits the HLO refuses.
            execution_requirements = {"no-sandbox": "1"},
            inputs = [ctx.file.emitter] + ctx.files.data + ctx.files.helpers,
            mnemonic = mnemonic,
            outputs = [made],
            progress_message = "Compiling %s by NKI" % ctx.label.name,
            tools = [toolchain.nki_driver],
        )
    return [DefaultInfo(files = depset([made]))]

_neuron_native_kernel = rule(
    doc = """Has NKI's own compiler compile one kernel (docs/reference/native-kernels.md).

The kernel's file, what it imports from its folder and that compiler's name and version are all that the action depends on.""",
    implementation = _neuron_native_kernel_impl,
    attrs = {
        "arrays": attr.string_list(doc = "The array arguments by NumPy's names: `float32[128,512]`."),
        "data": attr.label_list(allow_files = True, doc = "Files that the kernel's file opens."),
        "emitter": attr.label(mandatory = True, allow_single_file = [".py"], doc = "The kernel's file."),
        "env": attr.string_dict(doc = "The environment variables that the file sees."),
        "function": attr.string(mandatory = True, doc = "The function's name."),
        "grid": attr.int_list(doc = "The programs in each dimension; empty for a launch without a grid."),
        "helpers": attr.label_list(allow_files = [".py"], doc = "Modules it imports from its own folder."),
        "module": attr.string(doc = "The file's name in the package of Python that it is in; empty where it is in none."),
        "params": attr.string_dict(doc = "The static arguments by name, each as JSON."),
        "target": attr.string(mandatory = True, doc = "neuronx-cc's `--target`."),
    },
    toolchains = [_TOOLCHAIN],
)

def neuron_native_kernel(name, target, exec_properties = {}, **kwargs):
    """Has NKI's own compiler compile one kernel; see the rule.

    Args:
        name: the kernel.
        target: neuronx-cc's `--target`.
        exec_properties: as of every rule. With `--@neuron_kernelgen//rules:route_compiles` the compiler and the target are added.
        **kwargs: as of the rule.
    """
    _neuron_native_kernel(
        name = name,
        exec_properties = exec_properties | routed_to(target),
        target = target,
        **kwargs
    )
