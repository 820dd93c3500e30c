"""Programs in Python: kernelgen's build steps, its command line, and its tests. The locked environment runs all of them."""

KernelgenToolInfo = provider(
    doc = "One step of kernelgen as a program: the environment's Python and the sources that this step imports.",
    fields = {
        "module": "string: the module to run.",
        "python": "File: the launcher of the Python environment.",
        "sources": "depset of File: the step's Python sources.",
        "root": "string: the folder that holds the package `kernelgen`.",
    },
)

def without_comments(ctx, source, path):
    """Declares a copy of a Python source without comment lines, so that an edited comment does not change the users of the copy.

    Args:
        ctx: the rule's context.
        source: the File. No string in it has a line that begins with `#`; a test of kernelgen checks this for every such file.
        path: the copy's path in the rule's package.
    """
    copy = ctx.actions.declare_file(path)
    ctx.actions.run_shell(
        arguments = [source.path, copy.path],
        command = "sed -e '/^[[:space:]]*#/d' -e '/^[[:space:]]*$/d' \"$1\" >\"$2\"",
        # Sending this to a cluster takes longer than running it.
        execution_requirements = {"no-remote-exec": "1"},
        inputs = [source],
        mnemonic = "NeuronDriver",
        outputs = [copy],
        progress_message = "Copying %{input} without its comments",
    )
    return copy

def _driver_impl(ctx):
    return [DefaultInfo(files = depset([without_comments(ctx, ctx.file.src, ctx.label.name + ".py")]))]

driver = rule(
    doc = "A program in one file, without its lines of comment.",
    implementation = _driver_impl,
    attrs = {"src": attr.label(mandatory = True, allow_single_file = [".py"])},
)

def _kernelgen_tool_impl(ctx):
    marker = ctx.file._marker
    root = marker.path.removesuffix("/kernelgen/__init__.py")
    if ctx.attr.without_comments:
        # The package's own __init__.py has kernelgen's version, which does not affect the output of such a step.
        package = marker.short_path.removesuffix("__init__.py")
        sources = [
            without_comments(ctx, file, "{}/kernelgen/{}".format(ctx.label.name, file.short_path.removeprefix(package)))
            for file in ctx.files.srcs
        ]
        root = sources[0].path.partition("/{}/kernelgen/".format(ctx.label.name))[0] + "/" + ctx.label.name
    else:
        sources = ctx.files.srcs + [marker]
    return [
        DefaultInfo(files = depset(sources)),
        KernelgenToolInfo(
            module = ctx.attr.module,
            python = ctx.file.python,
            root = root,
            sources = depset(sources),
        ),
    ]

kernelgen_tool = rule(
    doc = "A build step of kernelgen. `srcs` are the modules that the step imports and no others, so that a change elsewhere rebuilds nothing.",
    implementation = _kernelgen_tool_impl,
    attrs = {
        "module": attr.string(default = "kernelgen.steps.worker", doc = "The module to run."),
        "python": attr.label(default = "@neuron_python//:python", allow_single_file = True, doc = "A launcher of the Python environment."),
        "srcs": attr.label_list(allow_files = True),
        "without_comments": attr.bool(doc = "Whether lines of comment, and kernelgen's version, are not part of the step."),
        "_marker": attr.label(default = "//tools/kernelgen:__init__.py", allow_single_file = True),
    },
)

def run_kernelgen(ctx, tool, arguments, worker, **kwargs):
    """Registers an action that runs one step of kernelgen.

    Args:
        ctx: the rule's context.
        tool: KernelgenToolInfo of the step.
        arguments: Args of the step, passed in a file with one argument per line.
        worker: whether a persistent worker may run it, which imports JAX once.
        **kwargs: further arguments of `ctx.actions.run`.
    """
    arguments.use_param_file("@%s", use_always = True)
    arguments.set_param_file_format("multiline")
    startup = ctx.actions.args()
    startup.add_all(["-P", "-m", tool.module])
    requirements = dict(kwargs.pop("execution_requirements", {}))
    if worker:
        # One request at a time. A multiplex worker would be faster (Bazel polls other workers for an answer only every 10 ms). But in a
        # build after an interrupted one, Bazel 7 assigns the late answers of a multiplex worker to the new requests.
        requirements |= {"supports-workers": "1", "requires-worker-protocol": "json"}
    ctx.actions.run(
        executable = tool.python,
        arguments = [startup, arguments],
        env = {
            # Bytecode is not an input of any action, so Python must not write it beside the sources.
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": tool.root,
            "PYTHONUTF8": "1",
        },
        execution_requirements = requirements,
        toolchain = kwargs.pop("toolchain", None),
        tools = tool.sources,
        **kwargs
    )

_SCRIPT = """\
#!/bin/sh
# Generated for {label}.
if [ -z "${{RUNFILES_DIR:-}}" ]; then
  if [ -d "$0.runfiles" ]; then RUNFILES_DIR=$0.runfiles; else RUNFILES_DIR=${{0%%.runfiles/*}}.runfiles; fi
fi
case "$RUNFILES_DIR" in /*) ;; *) RUNFILES_DIR=$PWD/$RUNFILES_DIR ;; esac
export RUNFILES_DIR
{setup}
export PYTHONPATH={path} PYTHONDONTWRITEBYTECODE=1
exec "$RUNFILES_DIR/{python}" -P {arguments} "$@"
"""

def _runfile(ctx, file):
    return file.short_path.removeprefix("../") if file.short_path.startswith("../") else ctx.workspace_name + "/" + file.short_path

def _script(ctx, arguments, setup):
    folders = {_runfile(ctx, ctx.file._marker).removesuffix("/kernelgen/__init__.py"): None}
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(
        script,
        _SCRIPT.format(
            arguments = arguments,
            label = ctx.label.name,
            path = ":".join(["$RUNFILES_DIR/" + f for f in folders]),
            python = _runfile(ctx, ctx.file.python),
            setup = setup,
        ),
        is_executable = True,
    )
    runfiles = ctx.runfiles(
        files = ctx.files.srcs + ctx.files.data + ctx.files.main + ctx.files._bytecode + [ctx.file.python, ctx.file._marker],
    ).merge_all([t[DefaultInfo].default_runfiles for t in ctx.attr.data + ctx.attr.srcs])
    return script, runfiles

def _program_impl(ctx):
    # A user runs the program: paths on its command line are relative to the user's current folder.
    script, runfiles = _script(
        ctx,
        arguments = '"$RUNFILES_DIR/{}"'.format(_runfile(ctx, ctx.file.main)) if ctx.file.main else "-m " + ctx.attr.module,
        setup = 'cd "${BUILD_WORKING_DIRECTORY:-.}"',
    )
    return [DefaultInfo(executable = script, files = depset([script]), runfiles = runfiles)]

_COMMON = {
    "data": attr.label_list(allow_files = True),
    "main": attr.label(allow_single_file = [".py"], doc = "A file to run."),
    "python": attr.label(default = "@neuron_python//:python", allow_single_file = True),
    "srcs": attr.label_list(allow_files = True),
    "_bytecode": attr.label_list(default = ["//tools/kernelgen:bytecode", "//tools/nki_interpreter:bytecode"]),
    "_marker": attr.label(default = "//tools/kernelgen:__init__.py", allow_single_file = True),
}

kernelgen_binary = rule(
    doc = "A Python module or file as a program: `bazel run //tools/kernelgen -- ARGS`.",
    implementation = _program_impl,
    attrs = _COMMON | {
        "module": attr.string(doc = "A module to run, when `main` is not given."),
    },
    executable = True,
)

def _pytest_impl(ctx):
    tests = [f for f in ctx.files.srcs if f.basename.startswith("test_")]
    script, runfiles = _script(
        ctx,
        arguments = " ".join(
            ["-m pytest", "-q", "-p no:cacheprovider", "--disable-plugin-autoload", "--rootdir=.", "--import-mode=importlib"] +
            ['--junitxml="$XML_OUTPUT_FILE"'] +
            ctx.attr.args_for_pytest +
            [f.short_path for f in tests],
        ),
        setup = 'cd "$RUNFILES_DIR/{}"'.format(ctx.workspace_name),
    )
    return [
        DefaultInfo(executable = script, files = depset([script]), runfiles = runfiles),
        RunEnvironmentInfo(environment = ctx.attr.env, inherited_environment = ctx.attr.env_inherit),
    ]

kernelgen_py_test = rule(
    doc = "Runs the `test_*.py` files of `srcs` with pytest in the development environment, from the workspace's root.",
    implementation = _pytest_impl,
    attrs = _COMMON | {
        "args_for_pytest": attr.string_list(),
        "env": attr.string_dict(),
        "env_inherit": attr.string_list(),
        "python": attr.label(default = "@neuron_python_dev//:python", allow_single_file = True),
    },
    test = True,
)
