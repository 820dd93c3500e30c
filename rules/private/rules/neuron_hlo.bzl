"""One kernel's HLO, from an op, a group of a graph's nodes, or a function in a file."""

load("//rules/private:languages.bzl", "DEFAULT_LANGUAGE", "LANGUAGES")
load("//rules/private:providers.bzl", "NeuronHloInfo")
load("//tools/bazel:kernelgen_tool.bzl", "KernelgenToolInfo", "run_kernelgen")

_MNEMONIC = "NeuronEmit"

def _emit(ctx, spec, emitters, language = DEFAULT_LANGUAGE, targets = [], native = None, prebuilt = None, missing = "", module = ""):
    """Registers the action that emits one kernel.

    Args:
        ctx: the rule's context.
        spec: the kernel as JSON.
        emitters: (name of the library, module) of each emitter.
        language: the language of the emitters.
        targets: the targets of the kernel, if its language requires them.
        native: the File with the output of NKI's own compiler, or None.
        prebuilt: the File with an earlier output of that compiler, or None.
        missing: why there is no such file; the action then fails.
        module: the emitter's module name in its Python package; empty without a package.

    Returns:
        the rule's providers.
    """
    kernel = ctx.label.name.removesuffix(".hlo")
    hlo = ctx.actions.declare_file(kernel + ".hlo.pb")
    args = ctx.actions.args()
    args.add("emit")
    args.add(spec, format = "--spec=%s")
    for library, file in emitters:
        args.add(library, format = "--library=%s")
        args.add(file, format = "--emitter=%s")
    if module:
        args.add(module, format = "--module=%s")
    args.add(hlo, format = "--output=%s")
    args.add_all(ctx.files.data, expand_directories = False, format_each = "--data=%s")
    args.add_all(targets, format_each = "--target=%s")
    if native:
        args.add(native, format = "--native=%s")
    if prebuilt:
        args.add(prebuilt, format = "--prebuilt=%s")
    outputs = [hlo]
    notes = None
    if language != DEFAULT_LANGUAGE:
        notes = ctx.actions.declare_file(kernel + ".notes.json")
        outputs.append(notes)
        args.add(notes, format = "--notes=%s")
    if missing:
        ctx.actions.run_shell(
            arguments = [missing],
            command = 'echo "$1" >&2; exit 1',
            mnemonic = _MNEMONIC,
            outputs = outputs,
        )
    else:
        run_kernelgen(
            ctx,
            (ctx.attr._jax_tool if ctx.attr.jax_alone else ctx.attr._tool)[KernelgenToolInfo],
            args,
            worker = True,
            inputs = [file for _, file in emitters] + ctx.files.helpers + ctx.files.data + [f for f in [native, prebuilt] if f],
            mnemonic = _MNEMONIC,
            outputs = outputs,
            progress_message = "Emitting " + kernel,
        )
    return [
        DefaultInfo(files = depset(outputs)),
        NeuronHloInfo(hlo = hlo, id = kernel, native = bool(native or prebuilt or missing), notes = notes, spec = spec),
    ]

def _neuron_hlo_impl(ctx):
    spec = json.encode({
        "alias": None if ctx.attr.alias < 0 else ctx.attr.alias,
        "inputs": [i or None for i in ctx.attr.inputs],
        "op": ctx.attr.op,
        "output": ctx.attr.output,
        "params": ctx.attr.params,
    })
    return _emit(ctx, spec, [(ctx.attr.library, ctx.file.emitter)], ctx.attr.language, ctx.attr.targets)

def _neuron_graph_hlo_impl(ctx):
    modules = [(library, target[DefaultInfo].files.to_list()) for target, library in ctx.attr.emitters.items()]
    return _emit(ctx, ctx.attr.spec, [(library, module) for library, files in modules for module in files])

def _neuron_source_hlo_impl(ctx):
    attr = ctx.attr
    emitters = [(attr.library, ctx.file.emitter)]
    spec = {
        "alias": {output: int(of) for output, of in attr.alias.items()},
        "arguments": attr.arguments,
        "env": attr.env,
        "grid": attr.grid,
        "inputs": attr.inputs,
        "lowering": attr.lowering,
        "name": attr.kernel,
        "outputs": attr.outputs,
        "params": {name: json.decode(value) for name, value in attr.params.items()},
        "source": attr.source,
    }
    return _emit(ctx, json.encode(spec), emitters, attr.language, attr.targets, ctx.file.native, ctx.file.prebuilt, attr.missing, attr.module)

_COMMON = {
    "data": attr.label_list(allow_files = True, doc = "Files that the emitter reads."),
    "helpers": attr.label_list(allow_files = [".py"], doc = "Modules that the emitter imports from its library."),
    "jax_alone": attr.bool(doc = "Whether the emitter and its helpers use JAX only. Then changes to the implementation of other languages do not re-emit the kernel."),
    "_jax_tool": attr.label(default = "//tools/kernelgen:emit_jax", providers = [KernelgenToolInfo]),
    "_tool": attr.label(default = "//tools/kernelgen:emit", providers = [KernelgenToolInfo]),
}

neuron_hlo = rule(
    doc = """Emits one kernel: an op on tensors of exact shape and type (docs/reference/manifest.md).

The action's inputs are the emitter's module, the helpers and the data. A sandbox has no other files.""",
    implementation = _neuron_hlo_impl,
    attrs = _COMMON | {
        "alias": attr.int(default = -1, doc = "The input that shares its memory with the result; -1 for the op's default."),
        "emitter": attr.label(mandatory = True, allow_single_file = [".py"], doc = "The module that registers the op."),
        "inputs": attr.string_list(doc = "The inputs, each `(ne0,ne1,ne2,ne3)/dtype[/(nb0,nb1,nb2,nb3)]`; an empty one is absent."),
        "language": attr.string(default = DEFAULT_LANGUAGE, values = LANGUAGES, doc = "The language of the emitter."),
        "library": attr.string(default = "kernelgen", doc = "The emitter's library: `kernelgen` for this project's own emitters, otherwise the folder's name."),
        "op": attr.string(mandatory = True, doc = "ggml's name of the op, in lower case."),
        "output": attr.string(mandatory = True, doc = "The result, in the same form."),
        "params": attr.string_dict(doc = "The op's parameters by ggml's names: `1` is a whole number, `1.0` a float, `true` a bool."),
        "targets": attr.string_list(doc = "The targets of the kernel, if its language requires them."),
    },
    provides = [NeuronHloInfo],
)

neuron_source_hlo = rule(
    doc = """Emits one kernel from a function in a file (docs/reference/source-kernels.md).

The action's inputs are the file, its imports from its folder or package, and the data. A sandbox has no other files.""",
    implementation = _neuron_source_hlo_impl,
    attrs = _COMMON | {
        "alias": attr.string_dict(doc = "The input that shares its memory with a result, by the result's number."),
        "arguments": attr.string_list(doc = "The arguments that receive the inputs; by default the first ones."),
        "emitter": attr.label(mandatory = True, allow_single_file = [".py"], doc = "The file."),
        "env": attr.string_dict(doc = "The environment variables of the emitter's process."),
        "grid": attr.int_list(doc = "The programs in each dimension; empty for a launch without a grid."),
        "inputs": attr.string_list(doc = "The array arguments: `f32[128,512]`."),
        "kernel": attr.string(mandatory = True, doc = "The name by which programs find the kernel."),
        "language": attr.string(default = DEFAULT_LANGUAGE, values = LANGUAGES, doc = "The language of the function."),
        "library": attr.string(mandatory = True, doc = "A name for the file's folder."),
        "lowering": attr.string(default = "interpreted", values = ["interpreted", "native"], doc = "How to lower the function to HLO."),
        "missing": attr.string(doc = "Why there is no `prebuilt` file. The build of the kernel fails with this message."),
        "module": attr.string(doc = "The file's module name in its Python package, such as `core.norm` for core/norm.py."),
        "native": attr.label(allow_single_file = [".json"], doc = "The output of NKI's own compiler: a `neuron_native_kernel`."),
        "outputs": attr.string_list(mandatory = True, doc = "The results, in the same form."),
        "params": attr.string_dict(doc = "The static arguments by name, each as JSON: `1`, `0.5`, `true`, `[1,2]`, `\"text\"`."),
        "prebuilt": attr.label(allow_single_file = [".json"], doc = "The output of `kernelgen prebuild`, in place of `native`."),
        "source": attr.string(mandatory = True, doc = "The function, `FILE.py:FUNCTION`, from the manifest's folder."),
        "targets": attr.string_list(doc = "The targets of the kernel, if its language requires them."),
    },
    provides = [NeuronHloInfo],
)

neuron_graph_hlo = rule(
    doc = """Emits one graph kernel: a group of nodes of a graph (docs/reference/graph-kernels.md).

The action's inputs are the emitters' modules, the helpers and the data. A sandbox has no other files.""",
    implementation = _neuron_graph_hlo_impl,
    attrs = _COMMON | {
        "emitters": attr.label_keyed_string_dict(
            mandatory = True,
            allow_files = [".py"],
            doc = "The modules that register the ops, each with its library's name. The first module that registers an op emits it.",
        ),
        "spec": attr.string(mandatory = True, doc = "The group, as `kernelgen plan --format json` prints it."),
    },
    provides = [NeuronHloInfo],
)
