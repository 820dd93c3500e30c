"""One kernel's HLO, from the emitters of a graph's ops, or from a function in a file."""

load("//rules/private:languages.bzl", "DEFAULT_LANGUAGE", "LANGUAGES")
load("//rules/private:providers.bzl", "NeuronHloInfo")
load("//tools/bazel:kernelgen_tool.bzl", "KernelgenToolInfo", "run_kernelgen")

_MNEMONIC = "NeuronEmit"

def _op_spec(ctx):
    """Returns the kernel that the attributes of an op describe, as JSON."""
    if not ctx.attr.op or not ctx.attr.output:
        fail("{}: `spec`, or `op` and `output` are needed".format(ctx.label))
    return json.encode({
        "alias": None if ctx.attr.alias < 0 else ctx.attr.alias,
        "inputs": [i or None for i in ctx.attr.inputs],
        "op": ctx.attr.op,
        "output": ctx.attr.output,
        "params": ctx.attr.params,
    })

def _neuron_hlo_impl(ctx):
    attr = ctx.attr
    kernel = ctx.label.name.removesuffix(".hlo")
    spec = attr.spec or _op_spec(ctx)
    native = attr.native or attr.prebuilt or attr.missing
    hlo = ctx.actions.declare_file(kernel + ".hlo.pb")
    notes = ctx.actions.declare_file(kernel + ".notes.json") if attr.language != DEFAULT_LANGUAGE else None
    outputs = [hlo] + ([notes] if notes else [])
    args = ctx.actions.args()
    args.add("emit")
    args.add(spec, format = "--spec=%s")
    for target, library in attr.emitters.items():
        for module in target[DefaultInfo].files.to_list():
            args.add(library, format = "--library=%s")
            args.add(module, format = "--emitter=%s")
    if attr.module:
        args.add(attr.module, format = "--module=%s")
    args.add(hlo, format = "--output=%s")
    args.add_all(ctx.files.data, expand_directories = False, format_each = "--data=%s")
    args.add_all(attr.targets, format_each = "--target=%s")
    args.add_all(ctx.files.native, format_each = "--native=%s")
    args.add_all(ctx.files.prebuilt, format_each = "--prebuilt=%s")
    if notes:
        args.add(notes, format = "--notes=%s")
    if attr.missing:
        ctx.actions.run_shell(
            arguments = [attr.missing],
            command = 'echo "$1" >&2; exit 1',
            mnemonic = _MNEMONIC,
            outputs = outputs,
        )
    else:
        run_kernelgen(
            ctx,
            (attr._jax_tool if attr.jax_alone else attr._tool)[KernelgenToolInfo],
            args,
            worker = True,
            inputs = ctx.files.emitters + ctx.files.helpers + ctx.files.data + ctx.files.native + ctx.files.prebuilt,
            mnemonic = _MNEMONIC,
            outputs = outputs,
            progress_message = "Emitting " + kernel,
        )
    return [
        DefaultInfo(files = depset(outputs)),
        NeuronHloInfo(hlo = hlo, id = kernel, native = bool(native), notes = notes, spec = spec),
    ]

neuron_hlo = rule(
    doc = """Emits one kernel: an op on tensors of exact shape and type (docs/reference/manifest.md), or any kernel as `kernelgen plan --format json` prints it.

The action's inputs are the emitters' modules, the helpers and the data. A sandbox has no other files.""",
    implementation = _neuron_hlo_impl,
    attrs = {
        "alias": attr.int(default = -1, doc = "The input that shares its memory with the result; -1 for the op's default."),
        "data": attr.label_list(allow_files = True, doc = "Files that the emitters read."),
        "emitters": attr.label_keyed_string_dict(
            mandatory = True,
            allow_files = [".py"],
            doc = "The modules that register the ops, each with its library's name: `kernelgen` for this project's own emitters, otherwise a name for the folder. The first module that registers an op emits it.",
        ),
        "helpers": attr.label_list(allow_files = [".py"], doc = "Modules that the emitters import from their libraries."),
        "inputs": attr.string_list(doc = "The op's inputs, each `(ne0,ne1,ne2,ne3)/dtype[/(nb0,nb1,nb2,nb3)]`; an empty one is absent."),
        "jax_alone": attr.bool(doc = "Whether the emitters and their helpers use JAX only. Then changes to the implementation of other languages do not re-emit the kernel."),
        "language": attr.string(default = DEFAULT_LANGUAGE, values = LANGUAGES, doc = "The language of the emitters."),
        "missing": attr.string(doc = "Why there is no `prebuilt` file. The build of the kernel fails with this message."),
        "module": attr.string(doc = "The emitter's module name in its Python package, such as `core.norm` for core/norm.py; empty without a package."),
        "native": attr.label(allow_single_file = [".json"], doc = "The output of NKI's own compiler: a `neuron_native_kernel`."),
        "op": attr.string(doc = "ggml's name of the op, in lower case."),
        "output": attr.string(doc = "The op's result, in the same form as the inputs."),
        "params": attr.string_dict(doc = "The op's parameters by ggml's names: `1` is a whole number, `1.0` a float, `true` a bool."),
        "prebuilt": attr.label(allow_single_file = [".json"], doc = "The output of `kernelgen prebuild`, in place of `native`."),
        "spec": attr.string(doc = "The kernel as JSON, instead of `op` and its attributes."),
        "targets": attr.string_list(doc = "The targets of the kernel, if its language requires them."),
        "_jax_tool": attr.label(default = "//tools/kernelgen:emit_jax", providers = [KernelgenToolInfo]),
        "_tool": attr.label(default = "//tools/kernelgen:emit", providers = [KernelgenToolInfo]),
    },
    provides = [NeuronHloInfo],
)
