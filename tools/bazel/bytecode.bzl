"""Compiled Python modules beside their sources, for programs and tests. Without them every process compiles its imports again."""

_SCRIPT = """\
import pathlib, py_compile, sys
for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
    source, name, folder = line.split("\\t")
    output = pathlib.Path(folder) / f"{pathlib.Path(source).stem}.{sys.implementation.cache_tag}.pyc"
    # Taken only where the source is the one that was compiled, whatever its date: tests change modules.
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    py_compile.compile(source, str(output), dfile=name, doraise=True, invalidation_mode=mode)
"""

def _python_bytecode_impl(ctx):
    package = ctx.label.package + "/"
    outputs = {}
    lines = ctx.actions.args().set_param_file_format("multiline").use_param_file("%s", use_always = True)
    for file in ctx.files.srcs:
        # Python searches this folder for them. Their names contain the interpreter's version, so the files are not declared.
        folder = "/".join((file.dirname + "/").removeprefix(package).split("/")[:-1] + ["__pycache__"])
        if folder not in outputs:
            outputs[folder] = ctx.actions.declare_directory(folder)
        lines.add_joined([file.path, file.short_path, outputs[folder].path], join_with = "\t")
    ctx.actions.run(
        mnemonic = "PythonBytecode",
        executable = ctx.file._python,
        arguments = [ctx.actions.args().add("-c").add(_SCRIPT), lines],
        env = {"PYTHONHASHSEED": "0"},
        inputs = ctx.files.srcs,
        outputs = outputs.values(),
        toolchain = None,
    )
    return [DefaultInfo(files = depset(outputs.values()), runfiles = ctx.runfiles(outputs.values()))]

python_bytecode = rule(
    doc = "The bytecode of this package's modules, in a folder `__pycache__` for each of their folders.",
    implementation = _python_bytecode_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".py"]),
        "_python": attr.label(default = "@neuron_python//:python", allow_single_file = True),
    },
)
